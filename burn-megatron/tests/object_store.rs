//! Copies of checkpoints on S3, over HTTP, to a server in this process that speaks what of the protocol they need.
//! `cargo test --release --workspace --features burn-megatron/object-store --test object_store`

use std::collections::{BTreeMap, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use burn_megatron::checkpoint::{Checkpoint, RunState, Saver, SaverOptions, Slice};
use burn_megatron::checkpoint::{fetch, open_storage, stored_steps, upload};
use parking_lot::Mutex;

/// What the bucket holds, and uploads in parts that are not complete.
#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Vec<u8>>,
    uploads: HashMap<String, BTreeMap<u32, Bytes>>,
    /// Requests without a signature.
    unsigned: usize,
}

type Shared = Arc<Mutex<Bucket>>;

fn between<'a>(text: &'a str, start: &str, end: &str) -> impl Iterator<Item = &'a str> {
    text.split(start).skip(1).filter_map(move |rest| rest.split(end).next())
}

fn xml(text: String) -> Response {
    ([("content-type", "application/xml")], text).into_response()
}

fn tagged() -> HeaderMap {
    HeaderMap::from_iter([(axum::http::header::ETAG, HeaderValue::from_static("\"tag\""))])
}

/// Answers a request in the path style, `/bucket/KEY`.
async fn answer(State(bucket): State<Shared>, method: Method, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let bucket = &mut *bucket.lock();
    bucket.unsigned += usize::from(!headers.contains_key("authorization"));
    let key = uri.path().trim_start_matches("/bucket").trim_start_matches('/').replace("%20", " ");
    let query: HashMap<String, String> =
        url::form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
    match (method, query.get("uploadId")) {
        (Method::POST, None) if query.contains_key("uploads") => {
            let id = format!("upload-{}", bucket.uploads.len());
            bucket.uploads.insert(id.clone(), BTreeMap::new());
            xml(format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"))
        }
        (Method::PUT, Some(_)) if key.ends_with("refused") => StatusCode::FORBIDDEN.into_response(),
        (Method::PUT, Some(id)) => {
            let part = query["partNumber"].parse().unwrap();
            bucket.uploads.get_mut(id).unwrap().insert(part, body);
            tagged().into_response()
        }
        (Method::POST, Some(id)) => {
            let parts = bucket.uploads.remove(id).unwrap();
            bucket.objects.insert(key, parts.into_values().flatten().collect());
            xml("<CompleteMultipartUploadResult><ETag>\"tag\"</ETag></CompleteMultipartUploadResult>".into())
        }
        (Method::DELETE, Some(id)) => {
            bucket.uploads.remove(id);
            StatusCode::NO_CONTENT.into_response()
        }
        (Method::POST, None) if query.contains_key("delete") => {
            let text = String::from_utf8(body.to_vec()).unwrap();
            let keys: Vec<&str> = between(&text, "<Key>", "</Key>").collect();
            keys.iter().for_each(|key| drop(bucket.objects.remove(*key)));
            let deleted: String = keys.iter().map(|key| format!("<Deleted><Key>{key}</Key></Deleted>")).collect();
            xml(format!("<DeleteResult>{deleted}</DeleteResult>"))
        }
        (Method::DELETE, None) => {
            bucket.objects.remove(&key);
            StatusCode::NO_CONTENT.into_response()
        }
        (Method::PUT, None) if headers.contains_key("if-none-match") && bucket.objects.contains_key(&key) => {
            StatusCode::PRECONDITION_FAILED.into_response()
        }
        (Method::PUT, None) => {
            bucket.objects.insert(key, body.to_vec());
            tagged().into_response()
        }
        (Method::GET, None) if query.contains_key("list-type") => {
            let prefix = query.get("prefix").cloned().unwrap_or_default();
            let entry = |(key, bytes): (&String, &Vec<u8>)| {
                format!(
                    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>\"tag\"</ETag>\
                     <Size>{}</Size></Contents>",
                    bytes.len()
                )
            };
            let found: String = bucket.objects.iter().filter(|(key, _)| key.starts_with(&prefix)).map(entry).collect();
            xml(format!("<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"))
        }
        (Method::GET, None) => match bucket.objects.get(&key) {
            Some(bytes) => {
                let mut headers = tagged();
                headers.insert("last-modified", HeaderValue::from_static("Thu, 01 Jan 2026 00:00:00 GMT"));
                (headers, bytes.clone()).into_response()
            }
            None => (StatusCode::NOT_FOUND, "<Error><Code>NoSuchKey</Code></Error>").into_response(),
        },
        _ => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

/// The bucket of a server on this machine, whose address the environment gets.
fn serve() -> Shared {
    let bucket = Shared::default();
    let (state, listener) = (Arc::clone(&bucket), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let router = Router::new().fallback(answer).with_state(state);
            let router = router.layer(axum::extract::DefaultBodyLimit::disable());
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router).await.unwrap();
        });
    });
    for (name, value) in [
        ("AWS_ENDPOINT", format!("http://{address}").as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "here"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ] {
        // SAFETY: the only test of this program, before it reads the environment on another thread.
        unsafe { std::env::set_var(name, value) };
    }
    let odd = std::ffi::OsStr::from_bytes(b"not UTF-8: \xff");
    // SAFETY: as above. Variables of others are nobody's business here.
    unsafe { std::env::set_var("ODD", odd) };
    bucket
}

fn state(step: u64) -> RunState {
    let skipped_samples = Some(0);
    RunState { step, consumed_samples: step, updates: step, skipped_samples, world_size: 1, ..RunState::default() }
}

/// 20 MB, so that an upload has several parts.
fn weights(step: u64) -> Slice {
    let bytes: Vec<u8> = (0..5_000_000_u64).flat_map(|at| ((at * step) as f32).to_le_bytes()).collect();
    Slice {
        kind: burn_megatron::checkpoint::Kind::Weight,
        name: "embedding.weight".into(),
        global_shape: vec![5000, 1000],
        ranges: vec![0..5000, 0..1000],
        dtype: safetensors::Dtype::F32,
        data: bytes.into(),
    }
}

fn file(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("rank_00000.safetensors")).unwrap()
}

#[test]
fn checkpoints_go_to_s3_and_come_back() {
    let bucket = serve();
    let storage = open_storage("s3://bucket/runs/a%20run/").unwrap();
    let [here, back] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let options = SaverOptions { keep_last: Some(2), storage: Some(storage.clone()), ..SaverOptions::default() };
    let saver = Saver::new(here.path(), 1, options).unwrap();
    for step in 1..=3 {
        saver.submit(0, vec![weights(step)], &state(step)).unwrap();
        saver.wait_for_copies().unwrap();
    }
    let copied: Vec<_> = saver.copied().into_iter().map(Result::unwrap).collect();
    assert_eq!((copied.len(), copied[2].deleted.as_slice()), (3, [1].as_slice()));
    assert_eq!(stored_steps(&*storage.0).unwrap(), [2, 3]);
    {
        let bucket = bucket.lock();
        assert!(bucket.objects.keys().all(|key| key.starts_with("runs/a run/")), "{:?}", bucket.objects.keys());
        assert_eq!((bucket.uploads.len(), bucket.unsigned), (0, 0));
    }
    // The storage is that of this run, whose folder `fetch` makes the other one.
    let other = |root: &Path| {
        let options = SaverOptions { storage: Some(storage.clone()), ..SaverOptions::default() };
        Saver::new(root, 1, options).map(drop).map_err(|error| error.to_string())
    };
    let said = other(back.path()).unwrap_err();
    assert!(said.starts_with("checkpoint.storage = s3://bucket/runs/a%20run belongs to another run"), "{said}");
    let existing = storage.0.create("owner", "Cargo.toml".as_ref()).unwrap_err();
    assert_eq!(existing.kind(), std::io::ErrorKind::AlreadyExists);
    let path = fetch(&*storage.0, None, back.path()).unwrap();
    other(back.path()).unwrap();
    assert_eq!(file(&path), file(Checkpoint::open(here.path()).unwrap().path()));

    // A bit of an object that changes is noticed, and a store that is gone is an error in time.
    let damaged = |key: &&String| key.contains("step_00000002/rank");
    let key = bucket.lock().objects.keys().find(damaged).unwrap().clone();
    *bucket.lock().objects.get_mut(&key).unwrap().last_mut().unwrap() ^= 1;
    let error = fetch(&*storage.0, Some(2), back.path()).unwrap_err().to_string();
    assert!(error.contains("rank_00000.safetensors"), "{error}");
    let error = storage.0.get("step_00000009/manifest.json", &back.path().join("x")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    upload(here.path(), 2, &*storage.0).unwrap();
    fetch(&*storage.0, Some(2), back.path()).unwrap();

    // More parts than are under way at a time, all zeros, and one that ends at once.
    for bytes in [200 << 20, 1] {
        let large = back.path().join("large");
        std::fs::File::create(&large).unwrap().set_len(bytes).unwrap();
        assert!(storage.0.put("refused", &large).is_err());
        assert_eq!(bucket.lock().uploads.len(), 0, "parts that stay cost money");
    }
}
