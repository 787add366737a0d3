//! Regular expressions of JSON schemas, which are those of ECMAScript, in the syntax of the crate `regex`.

/// The expression of the whole texts in which a pattern is found: it is anchored only where it says so.
pub(super) fn translate(pattern: &str) -> Result<String, String> {
    let mut out = String::from(r"\A(?s:.)*(?:");
    // In brackets, and whether nothing is in them yet.
    let (mut class, mut letters) = (None::<bool>, pattern.chars().peekable());
    while let Some(letter) = letters.next() {
        let is_first = class == Some(true);
        class = class.map(|_| false);
        match (letter, class) {
            ('\\', _) => {
                let escaped = letters.next().ok_or("nothing follows the last backslash")?;
                match escaped {
                    // ASCII, without the flag `u` and with it.
                    'd' => out += "[0-9]",
                    'D' => out += "[^0-9]",
                    'w' => out += "[0-9A-Za-z_]",
                    'W' => out += "[^0-9A-Za-z_]",
                    'b' if class.is_some() => out += r"\x08",
                    'b' => out += r"(?-u:\b)",
                    's' | 'S' | 'f' | 'n' | 'r' | 't' | 'v' | 'u' | 'x' | 'p' | 'P' => out.extend(['\\', escaped]),
                    // With a meaning of its own in `regex`.
                    '<' | '>' => out.push(escaped),
                    other if other.is_alphanumeric() => return Err(format!("`\\{other}` is not supported")),
                    other => out.extend(['\\', other]),
                }
            }
            ('[', None) => {
                class = Some(true);
                out.push('[');
            }
            ('^', Some(_)) if is_first && out.ends_with('[') => {
                class = Some(true);
                out.push('^');
            }
            (']', Some(_)) if is_first => return Err("brackets with nothing in them are not supported".into()),
            (']', Some(_)) => {
                class = None;
                out.push(']');
            }
            // Sets within sets are `regex`'s own.
            ('[' | '&' | '~', Some(_)) => out.extend(['\\', letter]),
            ('-', Some(_)) if letters.peek() == Some(&'-') => return Err("`--` in brackets is not supported".into()),
            ('.', None) => out += r"[^\n\r\u{2028}\u{2029}]",
            _ => out.push(letter),
        }
    }
    Ok(out + r")(?s:.)*\z")
}
