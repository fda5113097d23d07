"""Times PyTorch's scaled_dot_product_attention at the shapes of a report of certkv-bench-gpu, on the
same GPU, and adds it to the report. Where PyTorch or its GPU is missing it says so and changes nothing.

usage: torch_attention.py REPORT.json
"""

import json
import sys


def seconds_of(torch, row):
    """Median time of one decode step over the row's reads, FP16 keys and values, or None."""
    reads, heads, dim = row["reads"], row["group_size"], row["dim"]
    shape = (reads, 1, row["tokens"], dim)
    keys = torch.randn(shape, dtype=torch.float16, device="cuda")
    values = torch.randn(shape, dtype=torch.float16, device="cuda")
    # The query heads of a KV head as rows of one: no key is read twice.
    queries = torch.randn((reads, 1, heads, dim), dtype=torch.float16, device="cuda")
    times = []
    for _ in range(12):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / 5)
    return sorted(times[1:])[len(times[1:]) // 2]


def main(path):
    try:
        import torch
    except ImportError:
        print("torch_attention.py: PyTorch is not installed; its attention is not measured")
        return 0
    if not torch.cuda.is_available():
        print("torch_attention.py: PyTorch sees no GPU; its attention is not measured")
        return 0
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    for row in report["reads"]:
        seconds = seconds_of(torch, row)
        bytes_read = row["fp16_paged"]["bytes"]
        row["torch_sdpa"] = {
            "version": torch.__version__,
            "seconds": seconds,
            "gb_per_s": bytes_read / seconds * 1e-9,
            "share_of_copy": bytes_read / seconds * 1e-9 / report["copy"]["gb_per_s"],
        }
        for entry in row["formats"].values():
            entry["speed_over_torch_sdpa"] = seconds / entry["seconds"]
        print(f"PyTorch: {row['tokens']} tokens, {row['group_size']} heads: {seconds * 1e6:.1f} us")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
