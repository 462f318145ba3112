"""Which library should the reference backend's FP32 products go to: torch's default, or oneDNN?

One layer of the 1.5B model, [8960, 1536], in six copies so that no cache holds them; every round times both libraries
at every number of rows, one after the other. Prints medians, and the ratio of pairs with its quartiles.

    python benchmarks/fp32_products.py
"""

from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ROWS = (1, 2, 4, 6, 8, 16, 64, 256)
ROUNDS = 15


def default(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return made


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(8960, 1536, generator=rng) for _ in range(6)]
    times: dict[tuple[str, int], list[float]] = {}
    for round_number in range(ROUNDS + 1):
        for rows in ROWS:
            x = torch.randn(rows, 1536, generator=rng)
            for product in (default, onednn):
                started = perf_counter()
                for weight in weights:
                    product(x, weight)
                if round_number:
                    times.setdefault((product.__name__, rows), []).append((perf_counter() - started) / len(weights))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print("| rows | default ms | oneDNN ms | default over oneDNN, median (quartiles) |\n|---|---|---|---|")
    for rows in ROWS:
        a, b = np.array(times["default", rows]), np.array(times["onednn", rows])
        low, middle, high = np.percentile(a / b, (25, 50, 75))
        medians = f"{np.median(a) * 1e3:.2f} | {np.median(b) * 1e3:.2f}"
        print(f"| {rows} | {medians} | {middle:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
