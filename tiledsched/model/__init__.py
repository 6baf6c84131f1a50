"""The static model: an estimate of time from problem, schedule and machine-code facts, where nothing was measured."""
