"""The live service: takes jobs in, asks the core, carries out what it says."""
