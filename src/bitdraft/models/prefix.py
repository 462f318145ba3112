"""The prefix cache: texts that were computed once, as a tree over full KV blocks, for the requests that begin alike.

An edge of the tree is the tokens of one block, a node the block that holds their keys and values after everything above
it (a radix tree whose edges have one length: SGLang's RadixAttention, Zheng et al. 2312.07104, over the pages of
PagedAttention, Kwon et al. 2309.06180). The tree is one more user of each of its blocks. Blocks that nobody else uses
are idle; they are given up, least recently used first, where others are wanted.

A request holds a path from the root. Where it computed a block that the tree knows already it takes the tree's over and
gives its own back, so whoever uses a node uses the nodes above it, too, and an idle node has only idle ones below.
"""

from collections.abc import Sequence

from .kv import BlockPool, BlockTable


class _Node:
    """One block of the tree: the tokens in it, and what follows."""

    __slots__ = ("block", "children", "parent", "tokens")

    def __init__(self, parent: "_Node | None", tokens: tuple[int, ...], block: int) -> None:
        self.parent, self.tokens, self.block = parent, tokens, block
        self.children: dict[tuple[int, ...], _Node] = {}


class Path:
    """What the tree knows of one request.

    Attributes:
        tokens: everything that the request's table holds, whether true or drafted.
        nodes: the nodes of its first blocks.
    """

    def __init__(self, tokens: Sequence[int], nodes: Sequence[_Node]) -> None:
        self.tokens, self.nodes = list(tokens), list(nodes)


class PrefixCache:
    """The tree of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        """Begin with nothing.

        Args:
            pool: whose blocks are kept. Not of a format with codes: the rows after a cut read the blocks before it from
                full copies, and a sequence that went on has given those up (docs/decisions/0008-kv-in-codes.md).
        """
        assert not pool.format.bits
        self._pool = pool
        self._root = _Node(None, (), -1)
        self._idle: dict[_Node, None] = {}  # oldest first; a child is always older than its parent

    @property
    def idle(self) -> int:
        """Blocks that only the tree uses."""
        return len(self._idle)

    def start(self, table: BlockTable, tokens: Sequence[int]) -> Path:
        """Give an empty table the longest known prefix of `tokens` but for the last of them."""
        size, node, nodes = self._pool.block_size, self._root, []
        for end in range(size, len(tokens), size):
            child = node.children.get(tuple(tokens[end - size : end]))
            if child is None:
                break
            self._idle.pop(child, None)
            nodes.append(child)
            node = child
        table.adopt([node.block for node in nodes])
        return Path(tokens[: table.length], nodes)

    def keep(self, path: Path, table: BlockTable) -> None:
        """After a truncation: everything in the table is true. Its full blocks enter the tree."""
        size = self._pool.block_size
        del path.tokens[table.length :]
        full = len(path.tokens) // size
        held = len(path.nodes)
        while held and (held > len(table.blocks) or table.blocks[held - 1] != path.nodes[held - 1].block):
            held -= 1  # cut off, or copied to be written on
        self._leave(path, held)
        for i in range(len(path.nodes), full):
            parent = path.nodes[-1] if path.nodes else self._root
            tokens = tuple(path.tokens[i * size : (i + 1) * size])
            node = parent.children.get(tokens)
            if node is None:
                node = parent.children[tokens] = _Node(parent, tokens, table.blocks[i])
                self._pool.share(node.block, copied=False)
            elif node.block != table.blocks[i]:
                self._idle.pop(node, None)
                table.replace(i, node.block)
            path.nodes.append(node)

    def leave(self, path: Path) -> None:
        """The request's table is empty: what nobody else uses of its path is idle."""
        self._leave(path, 0)

    def make_room(self, blocks: int) -> None:
        """Give up idle blocks until so many are free, or none is idle."""
        while self._pool.num_free < blocks and self._idle:
            node = next(iter(self._idle))
            del self._idle[node]
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.tokens]
            self._pool.give_back(node.block, copied=False)

    def _leave(self, path: Path, length: int) -> None:
        for node in reversed(path.nodes[length:]):
            if not self._pool.shared(node.block):
                self._idle[node] = None
        del path.nodes[length:]
