"""Shows a trace in Perfetto on this machine: a server on loopback for one person, which uploads nothing."""
