"""Gates: decide by exit status whether a build, a drafter or a flag may go to production."""
