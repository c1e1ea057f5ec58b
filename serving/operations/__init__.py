"""What running a server needs beside serving: a watchdog, logs, traces. Importing it imports nothing else."""
