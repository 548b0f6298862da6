# A package, because a test module here and one in tests/unit may have the same name.
