"""The SLO controller and admission control on a simulated scheduler, as the engine and the doors have them."""

from __future__ import annotations

import time

from serving.request import Request
from serving.scheduling.admission import AdmissionControl
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.schedule import StepLimits
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.slo_controller import SloController
from serving.scheduling.step_time import LinearStepTime
from serving.simulation.simulator import HOST_S, Simulator

# What the controller is told of the device, over what is true: it has to learn it.
PRIOR_ERRORS = {
    "base_s": 0.67,
    "decode_row_s": 0.65,
    "decode_kv_token_s": 1.34,
    "prefill_token_s": 0.64,
    "prefill_pair_s": 0.6,
}


def wrong_prior(step_time: LinearStepTime) -> LinearStepTime:
    """The device's model with every coefficient off by a third."""
    return LinearStepTime(**{name: error * getattr(step_time, name) for name, error in PRIOR_ERRORS.items()})


class SimulatedControl:
    """Sets the hooks of a new `simulator` as the policy of its scheduler has it: steps under the controller, arrivals
    under admission control, at least one of them. Begins with a prior that is wrong."""

    def __init__(self, simulator: Simulator, step_time: LinearStepTime):
        scheduler = simulator.scheduler
        policy = scheduler.config.policy
        prior = OnlineStepTime(wrong_prior(step_time), scheduler.config.prefill_token_buckets)
        self.controller = SloController(scheduler, policy, prior)
        self.admission = AdmissionControl(policy) if policy.controls_admission else None
        self.num_decided, self.decide_s = 0, 0.0  # of the processor
        self._controls_steps = policy.controls_steps
        self._predicted: list[tuple[Request, float]] = []  # waits of those that have no token yet, seconds
        simulator.limits, simulator.observe = self._limits, self.controller.observe
        if self.admission is not None:
            simulator.admit = self._admit

    def _limits(self, now_s: float) -> StepLimits | None:
        limits = self.controller.limits(now_s)
        if self.admission is not None:
            waiting = []
            for request, predicted_s in self._predicted:
                if request.first_token_time_s is not None:
                    waited_s = request.first_token_time_s - request.arrival_time_s
                    self.admission.learn(request.context.priority, predicted_s, waited_s)
                elif not request.is_finished:
                    waiting.append((request, predicted_s))
            self._predicted = waiting
            self.admission.publish(self.controller.snapshot(now_s))
        return limits if self._controls_steps else None

    def _admit(self, request: Request, now_s: float) -> float | None:
        assert self.admission is not None
        started_s = time.thread_time()
        decision = self.admission.take(request.context.priority, request.num_tokens, now_s)
        self.decide_s += time.thread_time() - started_s
        self.num_decided += 1
        if decision.action == "refuse":
            return decision.retry_after_s
        self._predicted.append((request, decision.wait_s + now_s - request.arrival_time_s))
        return None


def controlled_simulator(config: SchedulerConfig, step_time: LinearStepTime, *, host_s: float = HOST_S) -> Simulator:
    """A simulator of a new scheduler, with the control that its policy asks for."""
    simulator = Simulator(Scheduler(config), step_time, host_s=host_s)
    if config.policy.controls_steps or config.policy.controls_admission:
        SimulatedControl(simulator, step_time)
    return simulator
