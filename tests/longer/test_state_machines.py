"""The state machines of the scheduler's parts at length. `make proofs` runs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import scheduling_machines as machines

CONFTEST = Path(__file__).parents[1] / "serving" / "scheduling" / "conftest.py"


def load_tools():
    """The engine and device of the scheduler's tests."""
    spec = importlib.util.spec_from_file_location("scheduling_conftest", CONFTEST)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.Tools()


def test_the_page_allocator_agrees_with_its_model_whatever_is_called():
    machines.check(machines.AllocatorMachine, max_examples=1500, num_steps=80)


def test_the_prefix_cache_finds_what_its_model_does_and_never_foreign_pages():
    machines.check(machines.CacheMachine, max_examples=1500, num_steps=80)


def test_the_scheduler_gives_solo_outputs_whatever_is_called():
    machines.check(machines.scheduler_machine(load_tools()), max_examples=1000, num_steps=60)
