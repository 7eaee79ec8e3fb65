"""Everything that needs torch: ranks, measurements inside them, real and replayed pipelines."""
