"""The backend `sglang`: captures of SGLang engines, running or about to run."""
