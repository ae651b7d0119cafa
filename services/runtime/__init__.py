"""What every Headrace service stands on. Deliberately empty: importing the package costs nothing."""
