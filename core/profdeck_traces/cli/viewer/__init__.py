"""Local web server for `profdeck view`. It serves one trace and the Perfetto UI on the loopback interface."""
