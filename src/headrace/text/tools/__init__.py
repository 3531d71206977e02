"""Tools and reasoning as model families write them: prompts, grammars, and the parser of what comes back."""
