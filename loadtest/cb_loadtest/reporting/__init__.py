"""From the JSON of load tests to pictures and one page."""
