"""Files, logs, memory and ports of the machine that this process runs on."""
