"""What a tenant may hold and ask for: KV budgets that may be overdrawn while nobody minds, and rate limits."""

from __future__ import annotations

import math
from collections import Counter

from configs.scheduling import SchedulingConfig


class KvBudgets:
    """KV that tenants hold, in tokens of whole pages. A page that several sequences share counts for each of them.

    A tenant over its budget borrows: it may while nobody within theirs waits, and gives back first.
    """

    def __init__(self, config: SchedulingConfig):
        self._budgets = {name: config.kv_tokens(name) for name in config.tenant_names}
        self._default = config.default_tenant_kv_tokens or None
        self.is_used = bool(config.default_tenant_kv_tokens or any(config.tenant_kv_tokens))
        self.held: Counter[str] = Counter()
        self.borrowers: set[str] = set()  # tenants over their budgets

    def hold(self, tenant: str, num_tokens: int) -> None:
        """So many more, or fewer where negative."""
        self.held[tenant] += num_tokens
        if self.excess(tenant) > 0:
            self.borrowers.add(tenant)
        else:
            self.borrowers.discard(tenant)
        if self.held[tenant] == 0:
            del self.held[tenant]

    def excess(self, tenant: str, num_more_tokens: int = 0) -> int:
        """Tokens over the budget, 0 within it, if the tenant held so many more."""
        budget = self._budgets.get(tenant, self._default)
        return 0 if budget is None else max(self.held[tenant] + num_more_tokens - budget, 0)


class _Bucket:
    """A token bucket that fills in a minute. It may go below zero, by what was known too late."""

    def __init__(self, per_min: int, now_s: float):
        self.per_min = per_min
        self._level = float(per_min)
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` may be taken, more than a full bucket counting as that; 0: now."""
        self._level = min(self._level + (now_s - self._filled_s) * self.per_min / 60, self.per_min)
        self._filled_s = now_s
        missing = min(amount, self.per_min) - self._level
        return max(missing, 0.0) * 60 / self.per_min

    def take(self, amount: float) -> None:
        self._level -= amount

    def is_full(self, now_s: float) -> bool:
        return self.wait_s(self.per_min, now_s) == 0


class RateLimits:
    """Requests and tokens a minute of each tenant, as token buckets: a burst may take a minute's worth at once.

    Prompt tokens are taken when a request is let in, output tokens as they come.
    """

    def __init__(self, config: SchedulingConfig):
        self._config = config
        self._buckets: dict[str, tuple[_Bucket | None, _Bucket | None]] = {}  # of requests, of tokens
        self._num_kept = 64

    def try_take(self, tenant: str, *, num_tokens: int, now_s: float) -> int:
        """Let a request of so many prompt tokens in and return 0, or return the whole seconds after which to try."""
        buckets = self._of(tenant, now_s)
        amounts = (1, num_tokens)
        wait_s = max(
            bucket.wait_s(amount, now_s) if bucket else 0.0 for bucket, amount in zip(buckets, amounts, strict=True)
        )
        if wait_s > 0:
            return math.ceil(wait_s)
        for bucket, amount in zip(buckets, amounts, strict=True):
            if bucket:
                bucket.take(amount)
        return 0

    def take_output(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Output tokens have come for a request that was let in."""
        bucket = self._of(tenant, now_s)[1]
        if bucket:
            bucket.take(num_tokens)

    def limits(self, tenant: str) -> str:
        """The tenant's limits as a message shows them."""
        requests, tokens = self._config.requests_per_min(tenant), self._config.tokens_per_min(tenant)
        parts = [f"{requests} requests" if requests else "", f"{tokens} tokens" if tokens else ""]
        return " and ".join(filter(None, parts)) + " a minute"

    def _of(self, tenant: str, now_s: float) -> tuple[_Bucket | None, _Bucket | None]:
        buckets = self._buckets.get(tenant)
        if buckets is None:
            limits = (self._config.requests_per_min(tenant), self._config.tokens_per_min(tenant))
            if limits == (None, None):
                return None, None
            if len(self._buckets) >= 2 * self._num_kept:
                self._forget(now_s)
            requests, tokens = (_Bucket(limit, now_s) if limit else None for limit in limits)
            buckets = self._buckets[tenant] = requests, tokens
        return buckets

    def _forget(self, now_s: float) -> None:
        """Those whose buckets are full, as new ones are: names are clients' to make up."""
        for name, buckets in list(self._buckets.items()):
            if all(bucket is None or bucket.is_full(now_s) for bucket in buckets):
                del self._buckets[name]
        self._num_kept = max(64, len(self._buckets))
