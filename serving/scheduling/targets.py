"""What each class of requests is promised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServiceTargets:
    """Classes by rising priority, as parallel tuples, and their targets in seconds; 0: no target.

    A request is of the last class whose priority is at most its own, of the first where none is. Classes without any
    target are background: they take what the others leave.
    """

    class_names: tuple[str, ...] = ("default",)
    class_priorities: tuple[int, ...] = (0,)
    class_ttft_s: tuple[float, ...] = (0.0,)  # to the first token
    class_tpot_s: tuple[float, ...] = (0.0,)  # for each further token, on average over the request

    def class_of(self, priority: int) -> int:
        """Index of the class."""
        index = 0
        while index + 1 < len(self.class_priorities) and self.class_priorities[index + 1] <= priority:
            index += 1
        return index

    def has_target(self, index: int) -> bool:
        return self.class_ttft_s[index] > 0 or self.class_tpot_s[index] > 0

    @property
    def has_targets(self) -> bool:
        return any(self.has_target(index) for index in range(len(self.class_names)))

    @property
    def background_priority(self) -> int | None:
        """From this priority on, requests have no target, and better classes have; None: there are no such."""
        with_target = [index for index in range(len(self.class_names)) if self.has_target(index)]
        if not with_target or with_target[-1] + 1 == len(self.class_names):
            return None
        return self.class_priorities[with_target[-1] + 1]
