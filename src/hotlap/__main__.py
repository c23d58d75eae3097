from hotlap.cli import main

main()
