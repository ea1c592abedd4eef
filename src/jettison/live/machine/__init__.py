"""What the machine grants a process: addresses, memory, folders, network namespaces, an end. No serving."""
