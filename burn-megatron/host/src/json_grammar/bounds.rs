//! Numbers between bounds, as regular expressions of their digits: without exponents, and with at most [`DIGITS`] of them in front
//! of the point and behind it.

use serde_json::Number;

/// As in numbers without bounds.
const DIGITS: usize = 18;
/// More than every whole part.
const BEYOND: u64 = 10_u64.pow(DIGITS as u32);

/// A number without its sign.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Size {
    whole: u64,
    /// Digits behind the point, the last of which is not 0.
    fraction: Vec<u8>,
}

/// A bound: its sign, its size, and whether it is legal itself.
#[derive(Clone, Debug)]
pub(super) struct Bound {
    is_negative: bool,
    size: Size,
    is_legal: bool,
}

impl Bound {
    /// Fails if it has too many digits.
    pub fn new(number: &Number, is_legal: bool) -> Result<Self, String> {
        let text = number.as_f64().filter(|_| number.is_f64()).map_or(number.to_string(), |number| number.to_string());
        let (is_negative, size) = text.strip_prefix('-').map_or((false, &text[..]), |size| (true, size));
        let (whole, fraction) = size.split_once('.').unwrap_or((size, ""));
        let fraction = fraction.trim_end_matches('0').bytes().map(|digit| digit - b'0').collect::<Vec<u8>>();
        let whole = whole.parse().ok().filter(|whole| *whole < BEYOND && fraction.len() <= DIGITS);
        let whole = whole.ok_or_else(|| format!("{number} has more than {DIGITS} digits"))?;
        let size = Size { whole, fraction };
        let is_zero = size == Size { whole: 0, fraction: Vec::new() };
        Ok(Self { is_negative: is_negative && !is_zero, size, is_legal })
    }
}

/// A number above 0 as a whole one of a decimal place. Fails if its automaton would be large.
pub(super) fn scaled(number: &Number) -> Result<(u64, usize), String> {
    const MOST_STATES: u64 = 100_000;
    let Bound { is_negative, size: Size { whole, fraction }, .. } = Bound::new(number, true)?;
    let scaled = fraction.iter().try_fold(whole, |all, digit| all.checked_mul(10)?.checked_add((*digit).into()));
    let states = scaled.and_then(|scaled| scaled.checked_mul(2 + fraction.len() as u64));
    match (scaled, states) {
        _ if is_negative => Err(format!("{number} is not above 0")),
        (Some(0), _) => Err("0 is not above 0".into()),
        (Some(scaled), Some(..=MOST_STATES)) => Ok((scaled, fraction.len())),
        _ => Err(format!("{number} has too many digits; nearest legal: 10000")),
    }
}

/// The numbers between two bounds; none if there are none.
pub(super) fn between(least: Option<Bound>, most: Option<Bound>, is_integer: bool) -> Option<String> {
    // Sizes of numbers above 0 or 0, and of those below it.
    let (mut above, mut below) = ((None, None), (None, None));
    let zero = |is_legal| Some(Bound { is_negative: false, size: Size { whole: 0, fraction: Vec::new() }, is_legal });
    let (mut has_above, mut has_below) = (true, true);
    match least {
        Some(least) if least.is_negative => below.1 = Some(least),
        Some(least) => (above.0, has_below) = (Some(least), false),
        None => {}
    }
    match most {
        Some(most) if most.is_negative => (below.0, has_above) = (Some(most), false),
        Some(most) => above.1 = Some(most),
        None => {}
    }
    above.0 = above.0.or(zero(true));
    below.0 = below.0.or(zero(false));
    let above = has_above.then(|| sizes(above.0, above.1, is_integer)).flatten();
    let below = has_below.then(|| sizes(below.0, below.1, is_integer)).flatten().map(|sizes| format!("-{sizes}"));
    any(above.into_iter().chain(below).collect())
}

/// One of some expressions.
fn any(all: Vec<String>) -> Option<String> {
    (!all.is_empty()).then(|| format!("(?:{})", all.join("|")))
}

fn sizes(least: Option<Bound>, most: Option<Bound>, is_integer: bool) -> Option<String> {
    let Bound { size: low, is_legal: with_low, .. } = least?;
    if is_integer {
        let from = low.whole + u64::from(!with_low || !low.fraction.is_empty());
        let to = match most {
            Some(Bound { size, is_legal, .. }) if size.fraction.is_empty() && !is_legal => size.whole.checked_sub(1)?,
            Some(Bound { size, .. }) => size.whole,
            None => BEYOND - 1,
        };
        return whole(from, to);
    }
    let low_fraction = (&low.fraction[..], with_low);
    let mut all = Vec::new();
    let high = most.as_ref().map(|most| (most.size.whole, (&most.size.fraction[..], most.is_legal)));
    let with = |whole: Option<String>, fraction: Option<String>| Some(whole? + &fraction?);
    match high {
        Some((high, _)) if high < low.whole => return None,
        Some((high, end)) if high == low.whole => {
            all.extend(with(whole(high, high), fraction(Some(low_fraction), Some(end))));
        }
        high => {
            all.extend(with(whole(low.whole, low.whole), fraction(Some(low_fraction), None)));
            let last = high.map_or(BEYOND - 1, |(high, _)| high - 1);
            all.extend(with(whole(low.whole + 1, last), fraction(None, None)));
            all.extend(high.and_then(|(high, end)| with(whole(high, high), fraction(None, Some(end)))));
        }
    }
    any(all)
}

/// The whole numbers of a range.
fn whole(from: u64, to: u64) -> Option<String> {
    let mut all = Vec::new();
    for digits in from.max(1).ilog10()..=to.max(1).ilog10() {
        let least = if digits == 0 { from } else { from.max(10_u64.pow(digits)) };
        let most = to.min(10_u64.pow(digits + 1) - 1);
        if least <= most {
            all.push(same_length(least.to_string().as_bytes(), most.to_string().as_bytes()));
        }
    }
    any(all)
}

/// Numbers of as many digits each.
fn same_length(from: &[u8], to: &[u8]) -> String {
    let ([low, from @ ..], [high, to @ ..]) = (from, to) else { return String::new() };
    let (low, high, rest) = (*low as char, *high as char, from.len());
    if from.iter().all(|digit| *digit == b'0') && to.iter().all(|digit| *digit == b'9') {
        return format!("[{low}-{high}][0-9]{{{rest}}}");
    }
    if low == high {
        return format!("{low}{}", same_length(from, to));
    }
    let mut all = vec![format!("{low}{}", same_length(from, &vec![b'9'; rest]))];
    if high as u8 - low as u8 > 1 {
        all.push(format!("[{}-{}][0-9]{{{rest}}}", (low as u8 + 1) as char, (high as u8 - 1) as char));
    }
    all.push(format!("{high}{}", same_length(&vec![b'0'; rest], to)));
    format!("(?:{})", all.join("|"))
}

/// What is left of a bound's digits, and whether the bound is legal.
type Rest<'a> = Option<(&'a [u8], bool)>;

/// The point and digits between two bounds, or nothing where 0 is between them.
fn fraction(least: Rest, most: Rest) -> Option<String> {
    let more = digits(least, most, DIGITS).map(|digits| format!("\\.{digits}"));
    any(more.into_iter().chain(is_between(least, most).then(String::new)).collect())
}

/// Whether no more digits may follow: a fraction of 0.
fn is_between(least: Rest, most: Rest) -> bool {
    least.is_none_or(|(rest, is_legal)| rest.is_empty() && is_legal)
        && most.is_none_or(|(rest, is_legal)| !rest.is_empty() || is_legal)
}

/// The bound of the digits behind one, where that is the bound's own.
fn behind(bound: Rest, digit: u8, own: u8) -> Rest {
    bound.filter(|_| digit == own).map(|(rest, is_legal)| (rest.get(1..).unwrap_or_default(), is_legal))
}

/// One digit or more, at most `room`.
fn digits(least: Rest, most: Rest, room: usize) -> Option<String> {
    let least = least.filter(|(rest, is_legal)| !rest.is_empty() || !is_legal);
    if room == 0 || most.is_some_and(|(rest, is_legal)| rest.is_empty() && !is_legal) {
        return None;
    }
    let first = |bound: Rest, none: u8| bound.map_or(none, |(rest, _)| rest.first().copied().unwrap_or(0));
    let (low, high) = (first(least, 0), first(most, 9));
    let (mut all, mut free) = (Vec::new(), Vec::new());
    for digit in low..=high {
        let (least, most) = (behind(least, digit, low), behind(most, digit, high));
        if (least, most) == (None, None) {
            free.push(digit);
            continue;
        }
        let more = digits(least, most, room - 1);
        let more = any(more.into_iter().chain(is_between(least, most).then(String::new)).collect());
        all.extend(more.map(|more| format!("{digit}{more}")));
    }
    if let (Some(first), Some(last)) = (free.first(), free.last()) {
        all.push(format!("[{first}-{last}][0-9]{{0,{}}}", room - 1));
    }
    any(all)
}
