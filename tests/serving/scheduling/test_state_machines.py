"""Calls in any order, a few examples of each; tests/longer has the same with many more."""

from __future__ import annotations

import scheduling_machines as machines


def test_the_page_allocator_agrees_with_its_model_whatever_is_called():
    machines.check(machines.AllocatorMachine, max_examples=60, num_steps=40)


def test_the_prefix_cache_finds_what_its_model_does_and_never_foreign_pages():
    machines.check(machines.CacheMachine, max_examples=60, num_steps=30)


def test_the_scheduler_gives_solo_outputs_whatever_is_called(tools):
    machines.check(machines.scheduler_machine(tools), max_examples=40, num_steps=30)
