// Which part of the text each token wrote, and how both are shown. Text becomes text nodes, never markup.

const encoder = new TextEncoder();

function sharedLength(a, b) {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length += 1;
  return length;
}

/**
 * Lays a stream of tokens over the stream of text that the server made of them.
 *
 * The text may lag behind the tokens (a stop string may be on its way, a character incomplete), and lacks what the
 * server leaves out (the end of the text, markers). Tokens are objects with `bytes`, or `token` where there are none.
 */
export class Aligner {
  constructor() {
    this.decoder = new TextDecoder();
    this.carried = [];
    this.waiting = [];
    this.texts = [];
    this.begun = false;
  }

  /**
   * Take in what came.
   * @param texts [kind, text] pairs, kind being "reasoning" or "content"
   * @param tokens the tokens
   * @param last whether nothing follows
   * @returns {kind, text, tokens} in order; no text where a token shows none, no tokens where none fit
   */
  push(texts, tokens, last) {
    for (const [kind, text] of texts) this.#hear(kind, text);
    for (const token of tokens) {
      this.carried.push(token);
      const bytes = token.bytes ? Uint8Array.from(token.bytes) : encoder.encode(token.token);
      const text = this.decoder.decode(bytes, { stream: true });
      if (text || !bytes.length) this.#wait(text);
    }
    if (last && this.carried.length) this.#wait(this.decoder.decode());
    const found = this.#matched(last);
    if (last) {
      for (const { kind, text } of this.texts) found.push({ kind, text, tokens: [] });
      this.texts = [];
    }
    return found;
  }

  #hear(kind, text) {
    const end = this.texts.at(-1);
    if (end?.kind === kind) end.text += text;
    else if (text) this.texts.push({ kind, text });
  }

  #wait(text) {
    this.waiting.push({ text, tokens: this.carried });
    this.carried = [];
  }

  #matched(last) {
    const found = [];
    while (this.waiting.length) {
      const { text, tokens } = this.waiting[0];
      const open = this.texts[0];
      if (!open && !last) break;
      const here = open?.text ?? "";
      let length = sharedLength(here, text);
      if (!this.begun && !length && text.startsWith(" ")) length = sharedLength(here, text.trimStart());
      const more = length < text.length && length === here.length && this.texts.length < 2;
      if (more && !last) break;
      this.waiting.shift();
      this.begun = true;
      found.push({ kind: open?.kind ?? "content", text: here.slice(0, length), tokens });
      if (open) {
        open.text = here.slice(length);
        if (!open.text) this.texts.shift();
      }
    }
    return found;
  }
}

/** Shows an answer in an element: a block for each line, a span for each token; fenced code in its own type. */
export class Writer {
  constructor(element) {
    this.element = element;
    this.line = null;
    this.text = "";
    this.code = false;
    this.kind = "content";
  }

  /** Show a piece of text that one token wrote; `index` finds the token again, null where there is none. */
  write(text, kind, origin, index) {
    if (kind !== this.kind) this.line = null;
    this.kind = kind;
    if (!text) {
      this.#span("", origin, index).classList.add("mute");
      return;
    }
    for (const piece of text.split(/(?<=\n)/)) {
      this.#span(piece, origin, index);
      this.text += piece;
      if (this.text.startsWith("```")) this.line.classList.add("fence");
      if (piece.endsWith("\n")) this.#close();
    }
  }

  #span(text, origin, index) {
    if (!this.line) {
      this.line = this.element.ownerDocument.createElement("div");
      this.line.className = `line ${this.kind}`;
      this.line.classList.toggle("code", this.code);
      this.text = "";
      this.element.append(this.line);
    }
    const span = this.element.ownerDocument.createElement("span");
    span.className = index === null ? "" : `tok ${origin}`;
    if (index !== null) span.dataset.token = String(index);
    span.textContent = text;
    this.line.append(span);
    return span;
  }

  #close() {
    if (this.line.classList.contains("fence")) this.code = !this.code;
    this.line = null;
  }
}
