"""Writing new keys and values into pages."""

from pallas_kernels.kv_page_write.api import write_kv

__all__ = ["write_kv"]
