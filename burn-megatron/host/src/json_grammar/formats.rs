//! Formats of strings that JSON schemas name, as regular expressions.

const HOUR: &str = "(?:[01][0-9]|2[0-3])";
const LABEL: &str = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";

/// The formats that are known.
pub(super) const FORMATS: [&str; 8] = ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "uuid"];

/// The expression of the strings of a format: those of RFC 3339, with real days; of RFC 5321 without quotes and comments; of
/// RFC 1123; of RFC 4122.
pub(super) fn expression(format: &str) -> Option<String> {
    // Every fourth year, but of full centuries only every fourth.
    let leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)";
    let day = "(?:0[1-9]|1[0-9]|2[0-8])";
    let date = format!(
        "(?:[0-9]{{4}}-(?:(?:0[1-9]|1[0-2])-{day}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{leap}-02-29)"
    );
    let time = format!("{HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{HOUR}:[0-5][0-9])");
    let byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    let hex = "[0-9A-Fa-f]";
    let text = match format {
        "date-time" => format!("{date}T{time}"),
        "date" => date,
        "time" => time,
        "duration" => {
            let number = "[0-9]{1,9}";
            let time = format!("T(?:{number}H(?:{number}M(?:{number}S)?)?|{number}M(?:{number}S)?|{number}S)");
            let day = format!("{number}D");
            let month = format!("{number}M(?:{day})?");
            let date = format!("(?:{number}Y(?:{month})?|{month}|{day})");
            format!("P(?:{date}(?:{time})?|{time}|{number}W)")
        }
        "email" => {
            let atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+";
            format!("{atom}(?:\\.{atom})*@{LABEL}(?:\\.{LABEL})+")
        }
        "hostname" => format!("{LABEL}(?:\\.{LABEL})*"),
        "ipv4" => format!("{byte}(?:\\.{byte}){{3}}"),
        "uuid" => format!("{hex}{{8}}-{hex}{{4}}-{hex}{{4}}-{hex}{{4}}-{hex}{{12}}"),
        _ => return None,
    };
    Some(format!("^(?:{text})$"))
}
