"""Input files: traces and other artifacts, and the facts that a run contains about them."""
