"""What it costs to spread a token over calls: `python -m bench.slices ARTIFACT`.

Decodes the same tokens in whole steps and in steps of fewer layers, one thread each, and prints the processor's time of
this thread a token and the longest call; medians over tokens of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headrace import embed

TOKENS = 40


def measured(model: embed.Model, budget: int) -> tuple[list[int], list[float], list[float]]:
    """Tokens, and of each the milliseconds of all its calls and of the longest one."""
    space = embed.Workspace(model, embed.aligned(embed.workspace_size(model)))
    size = 4 * embed.kv_block_size(model) + embed.kv_pool_overhead(model, 1)
    pool = embed.KVPool(model, embed.aligned(size), num_blocks=4, max_sequences=1)
    tokens, whole, longest = list[int](), list[float](), list[float]()
    with pool, space, embed.Sequence(pool) as sequence:
        embed.prefill(sequence, model.tokenize("Once upon a time"), space)
        calls: list[float] = []
        while len(tokens) < TOKENS:
            start = time.thread_time()
            outcome = embed.decode_step([sequence], budget, space)[0]
            calls.append(1000 * (time.thread_time() - start))
            if isinstance(outcome, embed.Token):
                tokens.append(outcome.id)
                whole.append(sum(calls))
                longest.append(max(calls))
                calls = []
    return tokens, whole[1:], longest[1:]  # the first token is a finish alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with embed.Model(given.artifact, max_context=192) as model:
        budgets = [model.num_layers, 8, 4, 2, 1]
        found: dict[int, tuple[list[float], list[float]]] = {b: ([], []) for b in budgets}
        first, _, _ = measured(model, model.num_layers)  # warms up
        for _ in range(given.rounds):
            for budget in budgets:
                tokens, whole, longest = measured(model, budget)
                assert tokens == first
                found[budget][0].extend(whole)
                found[budget][1].extend(longest)
        print("| layers a call | ms a token | longest call, ms |\n|---|---|---|")
        for budget, times in found.items():
            whole_ms, longest_ms = map(statistics.median, times)
            print(f"| {budget} | {whole_ms:.2f} | {longest_ms:.2f} |")


if __name__ == "__main__":
    main()
