"""The machine that a process runs on: files, logs, console, memory and the metrics port."""
