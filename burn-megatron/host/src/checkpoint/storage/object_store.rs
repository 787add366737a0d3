//! Object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, WriteMultipart};
use tokio::runtime::Runtime;

use super::super::error::{CheckpointError, Result};
use super::Storage;

/// Bytes of a part of an upload at least, which S3 asks for 5 MiB of.
const PART: u64 = 16 << 20;
/// Parts of an upload at most, which S3 allows 10,000 of.
const MOST_PARTS: u64 = 9_000;
/// Parts under way at a time.
const AT_ONCE: usize = 8;
/// What begins the names of the variables that have credentials and endpoints.
const VARIABLES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

/// A folder in a bucket.
pub struct ObjectStorage {
    url: String,
    store: Box<dyn ObjectStore>,
    folder: Key,
    runtime: Runtime,
}

impl ObjectStorage {
    /// That of a URL like `s3://BUCKET/FOLDER`. Credentials, region and endpoint are those of the environment:
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`; `GOOGLE_…`; `AZURE_…`.
    /// Nothing is asked of the store yet.
    ///
    /// # Errors
    /// If it is no such URL, or the environment makes no sense.
    pub fn open(url: &str) -> Result<Self> {
        let refuse = |what: String| CheckpointError::Option { option: "storage", value: url.into(), what };
        let parsed = url::Url::parse(url).map_err(|error| refuse(format!("is no URL: {error}")))?;
        // `vars` panics if any variable, whosever it is, is not UTF-8.
        let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        let variables = std::env::vars_os().filter_map(text);
        let variables = variables.filter(|(name, _)| VARIABLES.iter().any(|start| name.starts_with(start)));
        let (store, folder) = object_store::parse_url_opts(&parsed, variables)
            .map_err(|error| refuse(format!("cannot be opened with the {VARIABLES:?} of the environment: {error}")))?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(|error| refuse(format!("no threads for it: {error}")))?;
        Ok(Self { url: url.trim_end_matches('/').into(), store, folder, runtime })
    }

    fn key(&self, key: &str) -> Key {
        key.split('/').fold(self.folder.clone(), |path, part| path.join(part))
    }

    async fn upload(&self, key: &Key, mut from: File) -> io::Result<()> {
        let part = PART.max(from.metadata()?.len() / MOST_PARTS);
        let mut upload = WriteMultipart::new_with_chunk_size(self.store.put_multipart(key).await?, part as usize);
        let mut block = vec![0; 1 << 20];
        loop {
            let capacity = upload.wait_for_capacity(AT_ONCE).await.map_err(io::Error::from);
            let read = match capacity.and_then(|()| from.read(&mut block)) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) => {
                    // Parts that stay cost money. The first error says more than that of the end.
                    let _ = upload.abort().await;
                    return Err(error);
                }
            };
            upload.write(&block[..read]);
        }
        upload.finish().await?;
        Ok(())
    }
}

impl Storage for ObjectStorage {
    fn name(&self) -> String {
        self.url.clone()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        let from = File::open(from)?;
        self.runtime.block_on(self.upload(&self.key(key), from))
    }

    fn create(&self, key: &str, from: &Path) -> io::Result<()> {
        let (key, bytes) = (self.key(key), std::fs::read(from)?);
        match self.runtime.block_on(self.store.put_opts(&key, bytes.into(), PutMode::Create.into())) {
            Err(error @ object_store::Error::AlreadyExists { .. }) => {
                Err(io::Error::new(io::ErrorKind::AlreadyExists, error))
            }
            put => Ok(put.map(drop)?),
        }
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        let mut to = File::create_new(to)?;
        self.runtime.block_on(async {
            let mut bytes = self.store.get(&self.key(key)).await?.into_stream();
            while let Some(bytes) = bytes.try_next().await? {
                to.write_all(&bytes)?;
            }
            Ok(())
        })
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        // The store's prefixes are whole folders.
        let within = match prefix.rsplit_once('/') {
            Some((folder, _)) => self.key(folder),
            None => self.folder.clone(),
        };
        let name = |key: &Key| {
            let parts: Vec<_> = key.prefix_match(&self.folder)?.map(|part| part.as_ref().to_owned()).collect();
            Some(parts.join("/"))
        };
        let found = self.store.list(Some(&within)).map(|found| found.map(|found| name(&found.location)));
        let found: Vec<Option<String>> = self.runtime.block_on(found.try_collect())?;
        let mut keys: Vec<String> = found.into_iter().flatten().filter(|key| key.starts_with(prefix)).collect();
        keys.sort();
        Ok(keys)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        match self.runtime.block_on(self.store.delete(&self.key(key))) {
            Err(object_store::Error::NotFound { .. }) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
