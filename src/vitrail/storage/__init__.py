"""Files on disk and on the Hugging Face hub.

atomic_write    files and folders that appear only when they are complete
locks           exclusive locks on files, between threads and processes
scratch_folder  a locked temporary folder beside the file to write
part_folder     a folder of Parquet parts with a manifest
hub_client      listings, downloads and errors of the Hugging Face hub, for models and datasets
"""
