"""Start an engine from executables made by `headrace compile`, then by compiling, and compare: seconds, bits, step time.

    python benchmarks/executables_start.py --model=dummy:benchmarks/models/llama-3.1-8b --executables_dir=FOLDER ...

with the engine flags that FOLDER was compiled for. Ends with status 1 unless every program was loaded and both engines
gave the same tokens and log-probs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from typing import Any

from absl import logging

from configs.run import Configs
from serving import LLM, SamplingParams
from serving.cli.parser import add_engine_flags, configs_from

PROMPTS = [[(7 * i + j) % 1000 + 3 for j in range(200 + 50 * i)] for i in range(8)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, logprobs=1)


def run(configs: Configs, executables_dir: str | None) -> tuple[dict[str, Any], Any]:
    started_s = time.monotonic()
    # no compilation cache: the second engine is to compile
    config = dataclasses.replace(configs.engine, executables_dir=executables_dir, compilation_cache_dir="")
    llm = LLM(configs.run.model_source, engine_config=config, mesh_config=configs.mesh)
    ready_s = time.monotonic() - started_s
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # the first calls of a program are slower
    started_s = time.monotonic()
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    reports = llm.engine.runner.reports
    figures = {
        "executables": executables_dir,
        "ready_s": round(ready_s, 2),
        "programs_s": round(sum(report.compile_s for report in reports), 2),
        "loaded": sum(report.is_loaded for report in reports),
        "programs": len(reports),
        "output_tokens_per_s": round(len(PROMPTS) * PARAMS.max_tokens / (time.monotonic() - started_s), 1),
    }
    print(json.dumps(figures), flush=True)
    return figures, [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def main() -> int:
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_flags(parser)
    configs = configs_from(parser.parse_args())
    figures, loaded = run(configs, configs.engine.executables_dir)
    gc.collect()  # the first engine's pages leave no room for the second's
    _, compiled = run(configs, None)
    same = loaded == compiled
    print("the same tokens and log-probs" if same else "DIFFERENT tokens or log-probs", flush=True)
    return 0 if same and figures["loaded"] == figures["programs"] else 1


if __name__ == "__main__":
    sys.exit(main())
