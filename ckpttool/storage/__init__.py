"""Where bytes come from: directories, their files, links and nodes."""
