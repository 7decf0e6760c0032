"""HTTP transport of commands to engines in other processes, and file downloads."""
