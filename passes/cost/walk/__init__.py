"""What lies in memory while a graph runs, event by event, and which events Inductor lets run as one."""
