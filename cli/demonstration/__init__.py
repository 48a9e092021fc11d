"""`atoll demo`: a whole federation on one machine, through the commands that people type."""
