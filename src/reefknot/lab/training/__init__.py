"""Training that can be killed anywhere and resumes to the same bits."""
