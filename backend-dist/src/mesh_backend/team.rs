//! Logical devices of a program that runs on one rank of several.

use super::device::{LogicalDevices, Wanted, interpreter};
use super::follow::{Followers, Leader, Message, follow, forward};
use super::options::LogicalOptions;
use burn::tensor::Device;
use parking_lot::Mutex;
use ranks::comm::Group;
use ranks::launch::{BoxError, Rank};
use ranks::mesh::{Axis, Mesh};
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};

/// The ranks of each group along an axis as one *team*: the first of them, the leader, runs a program on a logical
/// device, and the others do the same operations on their shares.
///
/// With [`logical_device`](super::LogicalDevice::logical_device) all ranks run the program, so all need the same data in the same order. A team's
/// program reads its data once, and any of its threads may use the device: a data loader, metrics, a checkpointer.
/// Ranks of a team in other processes get their operations over the network.
///
/// ```
/// use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::Teams};
/// use burn::tensor::{Device, Tensor};
///
/// let mesh = Mesh::new("TP2 DP2".parse()?)?;
/// let teams = Teams::new(&mesh, Axis::Tp);
/// let sums = launch(&mesh, &[Device::flex()], |rank| {
///     teams.run(&rank, |device| Ok(Tensor::<1>::ones([6], &device).sum().into_scalar::<f32>() + rank.rank as f32))
/// })?;
/// // Ranks 0 and 2 lead.
/// assert_eq!(sums, [Some(6.0), None, Some(8.0), None]);
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
pub struct Teams {
    within: Axis,
    across: Vec<Axis>,
    sequence: bool,
    sync_batch_norm: bool,
    options: LogicalOptions,
    members: Mutex<HashMap<usize, Member>>,
}

enum Member {
    /// By follower.
    Leader(Vec<(usize, Sender<Message>)>),
    Follower(Receiver<Message>),
}

impl Teams {
    /// The teams of a launch of `mesh`, one for each of its groups along `within`.
    pub fn new(mesh: &Mesh, within: Axis) -> Self {
        let mut members = HashMap::new();
        for ranks in mesh.groups(within) {
            let mut senders = Vec::new();
            for &follower in &ranks[1..] {
                let (sender, receiver) = channel();
                senders.push((follower, sender));
                members.insert(follower, Member::Follower(receiver));
            }
            members.insert(ranks[0], Member::Leader(senders));
        }
        let options = LogicalOptions::default();
        let (across, members) = (Vec::new(), Mutex::new(members));
        Self { within, across, sequence: false, sync_batch_norm: false, options, members }
    }

    /// Collectives between the leaders of several teams, along another axis, are between all their ranks: each with its
    /// share, among those that have the same share of other tensors.
    pub fn across(mut self, axis: Axis) -> Self {
        self.across.push(axis);
        self
    }

    /// Sequence parallelism (Megatron-LM's `--sequence-parallel`): what comes out of an embedding, or out of a layer
    /// sharded by rows, as `[batch, sequence, features]` is sharded along the sequence, and so is what is computed from
    /// it until a layer sharded by columns gathers it. A sequence that the ranks do not divide stays whole.
    pub fn sequence_parallel(mut self, on: bool) -> Self {
        self.sequence = on;
        self
    }

    /// Batch normalization with the statistics of all ranks of the axes [`across`](Self::across), as PyTorch's
    /// `SyncBatchNorm`: in training, and so in running statistics. All of them must have as many samples.
    ///
    /// A program must have at most one backward pass between two collectives of its own: at its end Burn frees what is
    /// left of all graphs of the process, and waits for ranks that wait within a batch normalization.
    pub fn sync_batch_norm(mut self, on: bool) -> Self {
        self.sync_batch_norm = on;
        self
    }

    /// How the logical devices compute.
    pub fn options(mut self, options: LogicalOptions) -> Self {
        options.check();
        self.options = options;
        self
    }

    /// Runs `program` with the team's logical device if `rank` leads its team, else does what the leader does. The value
    /// of the program on a leader, which must have read what it wants to keep; the device ends with the program.
    ///
    /// # Errors
    /// Those of the program.
    ///
    /// # Panics
    /// If a rank joins its team twice.
    pub fn run<T>(
        &self,
        rank: &Rank,
        program: impl FnOnce(Device) -> Result<T, BoxError>,
    ) -> Result<Option<T>, BoxError> {
        let group = rank.group(self.within);
        let member = self.member(rank.rank);
        let wanted = Wanted {
            axes: &[self.within],
            across: &self.across,
            sequence: self.sequence,
            sync_batch_norm: self.sync_batch_norm,
            options: self.options,
        };
        match member.unwrap_or_else(|| panic!("rank {} joins its team once, in the launch it was made for", rank.rank))
        {
            Member::Leader(followers) => {
                let lines = followers.iter().filter(|(follower, _)| !rank.is_in_same_process(*follower));
                let lines = lines.map(|(follower, _)| self.line(rank, *follower, &group)).collect();
                let followers = Followers::new(followers.into_iter().map(|(_, sender)| sender).collect());
                let mut program_of = Program { followers: followers.clone(), ended_well: false, lines };
                let result = program(rank.attached::<LogicalDevices>().make(rank, &wanted, followers));
                program_of.ended_well = result.is_ok();
                result.map(Some)
            }
            Member::Follower(queue) => {
                let leader = match rank.is_in_same_process(group.ranks()[0]) {
                    true => Leader::Here(queue),
                    false => Leader::Elsewhere(group.clone(), VecDeque::new()),
                };
                if !follow(&mut *interpreter(rank, &wanted), leader) {
                    // Ends with the failure of the leader, who does not come.
                    group.barrier();
                }
                Ok(None)
            }
        }
    }
}

impl Teams {
    fn member(&self, rank: usize) -> Option<Member> {
        self.members.lock().remove(&rank)
    }

    /// A thread that sends the messages for `follower`, a rank of another process, until the program has ended. What it
    /// returns is closed then.
    fn line(&self, rank: &Rank, follower: usize, group: &Group) -> Receiver<()> {
        let Some(Member::Follower(queue)) = self.member(follower) else {
            unreachable!("who is not a thread of this process takes no place here")
        };
        let to = group.ranks().iter().position(|member| *member == follower).expect("a follower is of the group");
        let ((open, closed), group) = (channel(), group.clone());
        let mut line = Some((queue, open));
        rank.spawn(&format!("line to rank {follower}"), move || {
            if let Some((queue, _open)) = line.take() {
                forward(&queue, to, &group);
            }
        });
        closed
    }
}

/// Tells the followers how the program ended, also where it panicked.
struct Program {
    followers: Followers,
    ended_well: bool,
    /// Each is closed when everything has been sent to a follower in another process.
    lines: Vec<Receiver<()>>,
}

impl Drop for Program {
    fn drop(&mut self) {
        self.followers.tell(|| if self.ended_well { Message::End } else { Message::Failed });
        // A process that ends sends nothing any more.
        for line in &self.lines {
            let _ = line.recv();
        }
    }
}
