"""Settings of generate, score, select and serve, and of pipelines, whose YAML ``pipeline_file.py`` reads."""
