//! Shards of WebDataset: tar files in which the members of a sample follow each other.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use super::decode::{HEAD, expect_kind};
use super::error::ImageError;
use super::sample::{Entry, Found, Location, NO_TARGET, Target, target, unreadable};

/// Longest text, class or JSON of a sample.
const MOST: u64 = 1 << 24;

/// The members of a sample.
#[derive(Default)]
struct Members {
    key: String,
    images: Vec<Result<Range<u64>, String>>,
    /// Members of other endings, which count if there is no image: the message then says what they are.
    others: Vec<Result<Range<u64>, String>>,
    targets: Vec<Result<Target, String>>,
    /// A .json without a target, which is metadata if another member has one (img2dataset writes such).
    metadata: Vec<Result<Target, String>>,
}

/// A file that knows whether it was read at its end. Who reads a tar file stops at a block of zeros, which ends it.
struct Watched {
    file: File,
    is_over: bool,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.is_over |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

impl Seek for Watched {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// The samples of a shard. What comes after a damaged header or the end of a truncated shard is not there.
pub(super) fn read(path: &Path) -> Result<Found, ImageError> {
    let file = File::open(path).map_err(unreadable(path))?;
    let length = file.metadata().map_err(unreadable(path))?.len();
    let mut archive = tar::Archive::new(Watched { file, is_over: false });
    let (mut found, mut open) = (Found::default(), Members::default());
    // What is wrong with the end of the file; a member that is cut off says so itself.
    let (mut end, mut is_said) = (None, false);
    for member in archive.entries_with_seek().map_err(unreadable(path))? {
        let mut member = match member {
            Ok(member) => member,
            Err(error) => {
                end = Some(format!("{error}: the file is damaged or cut off"));
                break;
            }
        };
        if !member.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&member.path_bytes()).into_owned();
        // WebDataset: the key is the path up to the first dot of the file's name.
        let start = name.rfind('/').map_or(0, |slash| slash + 1);
        let Some(dot) = name[start..].find('.').map(|dot| start + dot) else { continue };
        let (key, ending) = (&name[..dot], name[dot + 1..].to_lowercase());
        if key != open.key {
            close(&mut open, path, &mut found);
            open.key = key.into();
        }
        let bytes = member.raw_file_position()..member.raw_file_position() + member.size();
        let cut_off = (bytes.end > length).then(|| format!("member {name} is cut off"));
        is_said |= cut_off.is_some();
        match ending.as_str() {
            "cls" | "txt" | "json" => {
                let named = |what: String| format!("member {name}: {what}");
                match cut_off.map_or_else(|| said(&mut member, &ending), Err) {
                    Ok(Some(target)) => open.targets.push(Ok(target)),
                    Ok(None) => open.metadata.push(Err(named(NO_TARGET.into()))),
                    Err(what) => open.targets.push(Err(named(what))),
                }
            }
            _ => {
                let is_image = matches!(ending.as_str(), "png" | "jpg" | "jpeg");
                let list = if is_image { &mut open.images } else { &mut open.others };
                list.push(cut_off.map_or_else(|| image(&mut member, &name, bytes), Err));
            }
        }
    }
    if end.is_none() && archive.into_inner().is_over && !is_said {
        end = Some("the file ends without a block of zeros: it is cut off".into());
    }
    let after = if open.key.is_empty() { "its start".into() } else { format!("sample {}", open.key) };
    close(&mut open, path, &mut found);
    found.unusable.extend(end.map(|what| format!("{}: after {after}: {what}", path.display())));
    Ok(found)
}

fn image(member: &mut impl Read, name: &str, bytes: Range<u64>) -> Result<Range<u64>, String> {
    let mut head = Vec::new();
    member.take(HEAD as u64).read_to_end(&mut head).map_err(|error| format!("member {name}: {error}"))?;
    expect_kind(&head).map(|_| bytes).map_err(|what| format!("member {name} {what}"))
}

fn said(member: &mut impl Read, ending: &str) -> Result<Option<Target>, String> {
    let mut text = String::new();
    member.take(MOST).read_to_string(&mut text).map_err(|error| error.to_string())?;
    match ending {
        "txt" => Ok(Some(Target::Text(text))),
        "cls" => {
            let class = text.trim();
            let label = class.parse().map(|class| Some(Target::Label(class)));
            label.map_err(|_| format!("is `{class}`; legal: the number of a class, from 0"))
        }
        _ => {
            let object: Value = serde_json::from_str(&text).map_err(|error| format!("is no JSON: {error}"))?;
            target(&object)
        }
    }
}

/// Ends a sample.
fn close(open: &mut Members, path: &Path, found: &mut Found) {
    let Members { key, images, others, targets, metadata } = std::mem::take(open);
    if key.is_empty() {
        return;
    }
    let image = one(if images.is_empty() { others } else { images }, "no image", "several images");
    let targets = if targets.is_empty() { metadata } else { targets };
    let target = one(targets, "none of .cls, .txt and .json", "several of .cls, .txt and .json");
    let place = format!("{}: sample {key}", path.display());
    match image.and_then(|image| Ok((image, target?))) {
        Ok((bytes, target)) => found.entries.push(Entry { place, image: Location::Within(bytes), target }),
        Err(what) => found.unusable.push(format!("{place}: {what}")),
    }
}

/// The only one, or what is wrong with the first that is wrong.
fn one<T>(found: Vec<Result<T, String>>, none: &str, several: &str) -> Result<T, String> {
    let mut found: Vec<T> = found.into_iter().collect::<Result<_, _>>()?;
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => Err(format!("has {none}")),
        _ => Err(format!("has {several}; legal: one")),
    }
}
