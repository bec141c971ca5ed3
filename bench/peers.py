"""Runs Consort and llama.cpp in turn on the same checkpoints and prints medians and ratios as a Markdown table.

Each round runs both programs once, pinned to the same cores, one right after the other and in changing order; a ratio is taken
within its round, so that what else the machine does weighs on both alike. The table gives the median of the rounds.
"""

import argparse
import json
import pathlib
import statistics
import subprocess

MODELS = ["smollm2-q4_1", "smollm2-q4_k_m", "smollm2-q8_0", "smollm2-bf16", "qwen-q4_k_m"]


def consort(model: pathlib.Path, threads: int, prompt: int, generate: int) -> tuple[float, float]:
    """Prefill and decode tokens per second."""
    answer = run(threads, ["target/release/consort", "bench", "--model", model, "--threads", threads, "--repetitions", 1,
                           "--prompt-tokens", prompt, "--generation-tokens", generate, "--json"])
    return answer["timings"]["prefill_tps"], answer["timings"]["decode_tps"]


def llama(model: pathlib.Path, threads: int, prompt: int, generate: int) -> tuple[float, float]:
    """The same of llama.cpp: its prompt test, and its generation test behind as many tokens of context."""
    program = model.parent / "llama.cpp/bin/llama-bench"
    tests = run(threads, [program, "--model", model, "--threads", threads, "--repetitions", 1, "--n-prompt", prompt,
                          "--n-gen", 0, "--n-gpu-layers", 0, "--output", "json"])
    tests += run(threads, [program, "--model", model, "--threads", threads, "--repetitions", 1, "--n-prompt", 0,
                           "--n-gen", generate, "--n-depth", prompt, "--n-gpu-layers", 0, "--output", "json"])
    return tests[0]["avg_ts"], tests[1]["avg_ts"]


def run(threads: int, command: list) -> dict | list:
    """What a program that writes JSON answers, pinned to the first cores."""
    pinned = ["taskset", "--cpu-list", f"0-{threads - 1}"] + [str(word) for word in command]
    return json.loads(subprocess.run(pinned, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=900).stdout)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    options = parser.parse_args()

    print(f"{options.prompt} prompt tokens, {options.generate} generated behind them, batch 1, medians of {options.rounds} rounds\n")
    print("| model | threads | prefill tok/s | llama.cpp | ratio | decode tok/s | llama.cpp | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models.split(","):
        model = options.directory / f"{name}.gguf"
        for threads in options.threads:
            rounds = []
            for number in range(options.rounds):
                programs = [consort, llama] if number % 2 == 0 else [llama, consort]
                figures = {program: program(model, threads, options.prompt, options.generate) for program in programs}
                rounds.append((figures[consort], figures[llama]))
            cells = []
            for phase in (0, 1):
                ours, theirs = [[pair[side][phase] for pair in rounds] for side in (0, 1)]
                ratio = statistics.median(our / their for our, their in zip(ours, theirs))
                cells += [f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}", f"{ratio:.2f}"]
            print(f"| {name} | {threads} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
