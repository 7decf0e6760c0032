"""Work on captures that have ended: finish commands and listeners, and the deletion of old steps."""
