"""Writing new keys and values into pages."""

from pallas_kernels.kv_page_write.api import rotate_and_write_kv, write_kv

__all__ = ["rotate_and_write_kv", "write_kv"]
