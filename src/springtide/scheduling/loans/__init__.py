"""Which servers serve and which train: strategies of loans, the forecast of demand, reclaims."""
