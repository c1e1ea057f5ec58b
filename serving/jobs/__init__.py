"""Batch files: lines, a store on disk, and the runner that works through them when nothing else waits."""
