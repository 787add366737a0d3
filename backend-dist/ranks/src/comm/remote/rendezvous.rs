//! How the processes of a run find each other: process 0 listens, the others connect, and all hear whether they agree.
//!
//! Whoever can reach the port can connect. A connection that is not of this run is closed, counted and reported once:
//! it costs a few KiB for a few seconds, and nothing that it sends ends the start.

use super::caller::{Caller, Friend, Strangers};
use super::frame::read_bytes;
use super::gate::{BYTES, End, Gate, nonce};
use super::introduction::{
    Answer, Greeting, HOST, Introduction, LIMIT, MAGIC, MANNERS, NAME, Place, Stranger, disagreement, printable, say,
};
use crate::comm::codec;
use crate::process::{JoinError, ProcessWorld};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// How long those who have not called yet may still hear why the start has failed.
const GRACE: Duration = Duration::from_secs(5);
/// Between two attempts to reach process 0.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two looks for callers.
pub(super) const LOOK: Duration = Duration::from_millis(10);
/// Callers that have not said who they are, in addition to two for each process; more are hung up on.
pub(super) const CROWD: usize = 32;
/// Most bytes of an answer: it has the hosts of all processes.
const ANSWER: usize = 1 << 24;

/// The connections by process, the hosts, and where each process waits for those below it.
type Joined = (Vec<Option<TcpStream>>, Vec<String>, Vec<Option<SocketAddr>>);

/// Brings the processes together.
///
/// # Errors
/// If a process does not come in time, or the processes do not agree.
pub(crate) fn rendezvous(world: &ProcessWorld, me: &Introduction) -> Result<Joined, JoinError> {
    let (gate, length) = (Gate::of(world), codec::to_bytes(me).len());
    if length > LIMIT {
        let names = me.agreement.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
        let what = format!("what the processes compare ({}) has {length} bytes, more than {LIMIT}", names.join(", "));
        return Err(JoinError::Refused(what));
    }
    let addresses: Vec<SocketAddr> = match (world.address.as_str(), world.port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(cause) => return Err(JoinError::Address { address: world.address.clone(), cause: cause.to_string() }),
    };
    if world.process == 0 { gather(world, me, &gate, &addresses) } else { call(world, me, &gate, &addresses) }
}

/// Process 0: waits for all others.
fn gather(world: &ProcessWorld, me: &Introduction, gate: &Gate, addresses: &[SocketAddr]) -> Result<Joined, JoinError> {
    let (address, port) = (world.address.clone(), world.port);
    let listener = listen(&listen_addresses(world, addresses)).map_err(|cause| JoinError::Listen {
        address,
        port,
        cause: cause.to_string(),
    })?;
    let start = Instant::now();
    let mut streams: Vec<Option<Friend>> = (0..world.processes).map(|_| None).collect();
    let (mut there, mut ports) = (vec![(0, me.host.clone())], vec![None; world.processes]);
    let (mut callers, mut strangers) = (Vec::<Caller>::new(), Strangers::default());
    let (mut called, mut refused) = (1, None::<(String, Instant)>);
    while there.len() < world.processes || refused.is_some() {
        if let Some((reason, _)) = refused.take_if(|(_, since)| called == world.processes || since.elapsed() > GRACE) {
            refuse(streams.iter_mut().flatten(), gate, &reason);
            return Err(JoinError::Refused(reason));
        }
        let most = 2 * world.processes + CROWD;
        for (stream, address) in std::iter::from_fn(|| listener.accept().ok()).take(most) {
            match Caller::new(stream, address) {
                Ok(caller) if callers.len() < most => callers.push(caller),
                Ok(_) => strangers.note(port, address, Stranger::Crowd),
                Err(_) => strangers.note(port, address, Stranger::Gone),
            }
        }
        for mut caller in std::mem::take(&mut callers) {
            let (introduction, nonce) = match caller.listen(gate) {
                Greeting::Incomplete => {
                    callers.push(caller);
                    continue;
                }
                Greeting::Stranger(why) => {
                    strangers.note(port, caller.address, why);
                    caller.hang_up(match why {
                        Stranger::Run => Some(other_run(port)),
                        Stranger::Secret => Some(other_secret(port)),
                        _ => None,
                    });
                    continue;
                }
                Greeting::Process(introduction, nonce) => (introduction, nonce),
            };
            let process = introduction.process;
            let second = there.iter().find(|(other, _)| *other == process);
            let second = second.map(|(_, host)| {
                let (processes, other) = (world.processes, &introduction.host);
                format!(
                    "two processes say that they are process {process} of {processes}: one on {host}, one on {other}; RANK \
                     must differ"
                )
            });
            called += 1;
            let reason = match (second.or_else(|| disagreement(me, &introduction)), caller.into_friend(nonce)) {
                (None, Ok(stream)) => {
                    there.push((process, introduction.host));
                    ports[process] = introduction.port;
                    streams[process] = Some(stream);
                    continue;
                }
                (Some(reason), stream) => {
                    streams.extend(stream.ok().map(Some));
                    reason
                }
                (None, Err(error)) => format!("the connection to process {process} has ended: {error}"),
            };
            refused.get_or_insert((reason, Instant::now()));
        }
        if refused.is_none() && start.elapsed() > world.patience {
            let missing = (0..world.processes).filter(|process| there.iter().all(|(other, _)| other != process));
            let (missing, waited, strangers) = (missing.collect(), world.patience, strangers.count);
            there.sort();
            let (address, processes) = (world.address.clone(), world.processes);
            let error = JoinError::Missing { address, port, waited, processes, missing, there, strangers };
            refuse(streams.iter_mut().flatten(), gate, &error.to_string());
            return Err(error);
        }
        thread::sleep(LOOK);
    }
    there.sort();
    let place = |(process, host): (usize, String)| {
        // By which it has reached process 0, so others reach it by the same.
        let address = || Some(streams[process].as_ref()?.stream.peer_addr().ok()?.ip().to_canonical());
        (host, ports[process].and_then(|port| Some(SocketAddr::new(address()?, port))))
    };
    let places: Vec<Place> = there.into_iter().map(place).collect();
    // Who is gone by now is missed by its reading thread.
    streams.iter_mut().flatten().for_each(|friend| drop(answer(friend, gate, &Answer::Ok(places.clone()))));
    let (hosts, addresses) = places.into_iter().unzip();
    Ok((streams.into_iter().map(|friend| friend.map(|friend| friend.stream)).collect(), hosts, addresses))
}

/// The other processes: call process 0 until it answers.
fn call(world: &ProcessWorld, me: &Introduction, gate: &Gate, addresses: &[SocketAddr]) -> Result<Joined, JoinError> {
    let start = Instant::now();
    let left = || world.patience.saturating_sub(start.elapsed());
    let mut cause = "nobody answered".to_string();
    while !left().is_zero() {
        for address in addresses {
            let stream = TcpStream::connect_timeout(address, left().clamp(PAUSE, MANNERS));
            let patience = left().saturating_add(MANNERS);
            match stream.and_then(|stream| introduce(stream, me, gate, patience, world)) {
                Ok((_, Ok(places))) if places.len() != world.processes => {
                    cause = "an answer with the hosts of another number of processes".into();
                }
                Ok((stream, Ok(places))) => {
                    let (hosts, addresses) = places.into_iter().unzip();
                    let mut streams: Vec<Option<TcpStream>> = (0..world.processes).map(|_| None).collect();
                    streams[0] = Some(stream);
                    return Ok((streams, hosts, addresses));
                }
                Ok((_, Err(reason))) => return Err(JoinError::Refused(reason)),
                Err(error) => cause = error.to_string(),
            }
        }
        thread::sleep(PAUSE);
    }
    let (process, address, port, waited) = (world.process, world.address.clone(), world.port, world.patience);
    Err(JoinError::Unreachable { process, address, port, tried: addresses.to_vec(), waited, cause })
}

/// Where process 0 listens: only within the host if `MASTER_ADDR` is within it, otherwise on all its addresses, since
/// a host need not know the name that others call it by.
pub(super) fn listen_addresses(world: &ProcessWorld, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let port = world.port;
    let local: Vec<SocketAddr> = addresses.iter().copied().filter(|address| address.ip().is_loopback()).collect();
    // On the host itself its name may mean 127.0.1.1, elsewhere the address by which others reach it.
    let is_hosts_name = world.address.parse::<IpAddr>().is_err() && !world.address.eq_ignore_ascii_case("localhost");
    match local.is_empty() || (is_hosts_name && !world.one_host) {
        true => vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()],
        false => local,
    }
}

/// Listens on the first address that works: a host may have no IPv6.
pub(super) fn listen(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(addresses)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn other_run(port: u16) -> String {
    format!(
        "process 0 on port {port} is of another run: the port, TORCHELASTIC_RUN_ID and SLURM_JOB_ID must be the same \
         in all processes"
    )
}

fn other_secret(port: u16) -> String {
    format!("process 0 on port {port} has another BURN_MEGATRON_SECRET; it must be the same in all processes")
}

pub(super) fn introduce(
    mut stream: TcpStream,
    me: &Introduction,
    gate: &Gate,
    patience: Duration,
    world: &ProcessWorld,
) -> io::Result<(TcpStream, Answer)> {
    let bad = |what: &str| io::Error::new(ErrorKind::InvalidData, what);
    stream.set_write_timeout(Some(MANNERS))?;
    let start = Instant::now();
    let mut reader = Until { stream: &stream, start, patience };
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic).map_err(|error| io::Error::new(error.kind(), format!("no answer came ({error})")))?;
    if magic != *MAGIC && magic[..NAME] == MAGIC[..NAME] {
        let what = "process 0 is another version of burn-megatron; all processes must run the same executable";
        return Ok((stream, Err(what.into())));
    }
    if magic != *MAGIC {
        return Err(bad("what answers is not burn-megatron; another program may have the port"));
    }
    let (mut first, own) = ([0; BYTES], nonce().map_err(io::Error::other)?);
    reader.read_exact(&mut first)?;
    stream.write_all(&me.to_bytes(gate, [&first, &own]))?;
    let mut reader = Until { stream: &stream, start, patience };
    let (mut proof, mut length) = ([0; BYTES], [0; 4]);
    reader.read_exact(&mut proof)?;
    reader.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length as usize > ANSWER {
        return Err(bad("an answer that is too long"));
    }
    let text = read_bytes(&mut reader, length.into())?;
    let answer: Answer = codec::from_bytes(&text).map_err(|what| bad(&what))?;
    let is_known = gate.accepts(&proof, End::First, [&first, &own], &text);
    let answer = match answer {
        Ok(_) if !is_known => Err(other_secret(world.port)),
        Ok(places) => Ok(places.into_iter().map(|(host, address)| (printable(&host, HOST), address)).collect()),
        Err(reason) => Err(printable(&reason, 4096)),
    };
    Ok((stream, answer))
}

/// Reads until a time is over, however slowly the bytes come.
struct Until<'a> {
    stream: &'a TcpStream,
    start: Instant,
    patience: Duration,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.patience.saturating_sub(self.start.elapsed());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

fn refuse<'a>(friends: impl Iterator<Item = &'a mut Friend>, gate: &Gate, reason: &str) {
    for friend in friends {
        // One that is gone need not hear it.
        let _ = answer(friend, gate, &Answer::Err(reason.to_string()));
    }
}

/// Answers with the proof that this process knows the secret.
pub(super) fn answer(friend: &mut Friend, gate: &Gate, answer: &Answer) -> io::Result<()> {
    let [first, caller] = &friend.nonces;
    let proof = gate.proof(End::First, [first, caller], &codec::to_bytes(answer));
    say(&mut friend.stream, answer, proof)
}
