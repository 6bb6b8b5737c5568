"""Load tests and the recall harness of cb-sglang; talks to a server over HTTP only."""
