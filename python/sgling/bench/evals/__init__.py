"""Task evaluations: right answers, not speed."""
