"""How individuals are bred: propagators, the surrogate, what they know of the run, and Propulate's islands."""
