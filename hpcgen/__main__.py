"""`python -m hpcgen`, for jobs whose PATH has no hpcgen command."""

from hpcgen.cli.main import main

if __name__ == "__main__":
    main()
