-- Common prelude of every transition. KEYS[1] is hr:{run}:cfg; all other keys share its slot.
--
-- A transition works on group records, collects counter changes and ledger events, and ends with commit(), which
-- writes both. Every reply is an array whose first element is 'ok' or the name of a refusal; a refusal writes nothing.
--
-- Fields of a group record g:{book}:{ordinal}
--   state n step left lost spec minv ts rs reason sw  left: samples still to come, lost: given up one by one,
--                                                     ts: step that trained it, rs: restored, not trained again yet,
--                                                     sw: a straggler that has changed places with a ready group
-- and for each sample i
--   s<i> q(ueued) c(laimed) d(one) x (lost)   a<i> attempts handed out   e<i> its queue entry, 'w' or 'r' + id
--   h<i> attempts up to this one are void: a restore has taken them back ('held' says so of the group)
--   w<i> worker   c<i> root of its trace   t<i> queued at, ns   fi<i>, fd<i> failures by infrastructure and by data   x<i> why it was lost
--   m<i> ManifestSample   r<i> SampleResult   o<i> outcome of the last failure

-- Before 7.0 scripts replicate as scripts; effects are needed because transitions read the clock.
if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call
local PREFIX = string.sub(KEYS[1], 1, -4)
local TIME = call('TIME')
local NOW = TIME[1] .. string.format('%06d', tonumber(TIME[2])) .. '000'
local STREAMS = { w = PREFIX .. 'work', r = PREFIX .. 'redo' }

local CFG = {}
do
  local fields = { 'infra', 'data', 'claim_ms', 'min', 'max_age', 'epoch' }
  local values = call('HMGET', KEYS[1], unpack(fields))
  for i, field in ipairs(fields) do CFG[field] = tonumber(values[i] or '') end
end

local deltas, events = {}, {}

local function count(book, field, by)
  local fields = deltas[book]
  if not fields then fields = {}; deltas[book] = fields end
  fields[field] = (fields[field] or 0) + by
end

local function emit(kind, book, group, samples, step, reason, epoch)
  events[#events + 1] = { kind, book, group, samples, step, reason or '', epoch or '' }
end

-- Writes what count() and emit() have collected. The ledger's entry id is the sequence number: a gap is a lost event.
local function commit()
  for book, fields in pairs(deltas) do
    for field, by in pairs(fields) do
      if by ~= 0 then call('HINCRBY', PREFIX .. 'n:' .. book, field, by) end
    end
  end
  if #events == 0 then return end
  local seq = call('HINCRBY', KEYS[1], 'seq', #events) - #events
  for i, e in ipairs(events) do
    call('XADD', PREFIX .. 'ledger', string.format('%.0f-0', seq + i), 'at', NOW, 'k', e[1], 'b', e[2], 'g', e[3],
      'n', e[4], 's', e[5], 'r', e[6], 'e', e[7])
  end
end

-- nil when the epoch may act (and is now the highest seen), else the refusal.
local function refuse_epoch(epoch)
  local highest = CFG.epoch or 0
  if epoch < highest then return { 'fenced', string.format('%.0f', highest) } end
  if epoch > highest then call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch)) end
  return nil
end

local function load(book, ordinal)
  local key = PREFIX .. 'g:' .. book .. ':' .. ordinal
  local v = call('HMGET', key, 'state', 'n', 'step', 'left', 'lost')
  if not v[1] then return nil end
  return { key = key, book = book, ordinal = ordinal, state = v[1], n = tonumber(v[2]), step = tonumber(v[3]),
    left = tonumber(v[4]), lost = tonumber(v[5]) }
end

-- Replies carry few, long elements: a client pays for each of them. SEPARATOR joins fields that never contain it.
local SEPARATOR = '\31'

-- A record for the audit: state, n, step, left, reason, ts, then state and reason of loss of each sample.
local function describe(book, ordinal)
  local key = PREFIX .. 'g:' .. book .. ':' .. ordinal
  local fields = { 'state', 'n', 'step', 'left', 'reason', 'ts' }
  for i = 0, tonumber(call('HGET', key, 'n') or '0') - 1 do
    fields[#fields + 1] = 's' .. i
    fields[#fields + 1] = 'x' .. i
  end
  local values = call('HMGET', key, unpack(fields))
  for i = 1, #fields do values[i] = values[i] or '' end
  return table.concat(values, SEPARATOR)
end

-- A ledger entry for the audit: sequence number, then its values in the order of commit().
local function line(entry)
  local values = { string.match(entry[1], '^%d+') }
  for i = 2, #entry[2], 2 do values[#values + 1] = entry[2][i] end
  return table.concat(values, SEPARATOR)
end

-- What still counts in samples: those lost were dropped one by one.
local function usable(group) return group.n - group.lost end

local function is_live(state) return state == 'open' or state == 'complete' or state == 'ready' or state == 'leased' end

local function bucket(state)
  if is_live(state) then return 'open' end
  if state == 'dropped' then return nil end
  return 'trained'
end

-- Moves a group to another state; counters follow, groups and samples alike. A drop counts its reason.
local function move(group, state, reason)
  local from, to = bucket(group.state), bucket(state) or ('dropped:' .. (reason or ''))
  count(group.book, 'state:' .. group.state, -1)
  count(group.book, 'state:' .. state, 1)
  if from ~= to then
    count(group.book, 'g:' .. from, -1)
    count(group.book, 's:' .. from, -usable(group))
    count(group.book, 'g:' .. to, 1)
    count(group.book, 's:' .. to, usable(group))
    if to == 'open' then
      call('ZADD', PREFIX .. 'live:' .. group.book, group.ordinal, group.ordinal)
    else
      call('ZREM', PREFIX .. 'live:' .. group.book, group.ordinal)
    end
  end
  group.state = state
  call('HSET', group.key, 'state', state)
end

local function enqueue(group, i, stream)
  local id = call('XADD', STREAMS[stream], '*', 'b', group.book, 'g', group.ordinal, 'i', i)
  call('HSET', group.key, 's' .. i, 'q', 'e' .. i, stream .. id, 't' .. i, NOW)
end

-- Takes a sample's entry off its queue, claimed or not.
local function dequeue(entry)
  if not entry or entry == '' then return end
  local stream, id = STREAMS[string.sub(entry, 1, 1)], string.sub(entry, 2)
  call('XACK', stream, 'gym', id)
  call('XDEL', stream, id)
end

-- Takes back what is still to be sampled: the version that the group waits for does not exist any more. Its samples
-- have no queue entry until OpenGroups names the group again, and what their workers still bring is stale.
local function hold(group)
  for i = 0, group.n - 1 do
    local v = call('HMGET', group.key, 's' .. i, 'e' .. i, 'a' .. i)
    if v[1] == 'q' or v[1] == 'c' then
      dequeue(v[2])
      if v[1] == 'c' then
        count(group.book, 'claimed', -1)
        count(group.book, 'queued', 1)
      end
      call('HSET', group.key, 's' .. i, 'q', 'e' .. i, '', 'h' .. i, v[3])
    end
  end
  call('HSET', group.key, 'held', '1')
end

-- Queues the samples of a held group again.
local function unhold(group)
  for i = 0, group.n - 1 do
    local v = call('HMGET', group.key, 's' .. i, 'e' .. i)
    if v[1] == 'q' and v[2] == '' then enqueue(group, i, 'r') end
  end
  call('HDEL', group.key, 'held')
end

local function retire(group)
  local keys = { PREFIX .. 'p:' .. group.book .. ':' .. group.ordinal }
  for i = 0, group.n - 1 do keys[#keys + 1] = PREFIX .. 't:' .. group.book .. ':' .. group.ordinal .. ':' .. i end
  call('UNLINK', unpack(keys))
  call('HDEL', group.key, 'spec')
end

local function drop(group, reason, kind)
  for i = 0, group.n - 1 do
    local v = call('HMGET', group.key, 's' .. i, 'e' .. i)
    if v[1] == 'q' or v[1] == 'c' then
      dequeue(v[2])
      count(group.book, v[1] == 'q' and 'queued' or 'claimed', -1)
    end
  end
  move(group, 'dropped', reason)
  retire(group)
  call('HSET', group.key, 'reason', reason)
  call('ZREM', PREFIX .. 'step:' .. group.book .. ':' .. group.step, group.ordinal)
  emit(kind or 'drop', group.book, group.ordinal, usable(group), group.step, reason)
end

local function complete(group)
  move(group, 'complete')
  call('XADD', PREFIX .. 'complete', '*', 'b', group.book, 'g', group.ordinal)
  emit('complete', group.book, group.ordinal, usable(group), group.step)
end

-- Fewest usable samples that keep a group alive. Evaluation keeps what it has got.
local function minimum(group)
  if group.book ~= 'train' then return 1 end
  local least = CFG.min or 0
  if least == 0 or least > group.n then return group.n end
  return least
end

-- Gives one sample up. The group goes with it when too few are left.
local function lose(group, i, reason)
  group.left = group.left - 1
  group.lost = group.lost + 1
  call('HSET', group.key, 's' .. i, 'x', 'x' .. i, reason, 'left', group.left, 'lost', group.lost)
  count(group.book, 'claimed', -1)
  count(group.book, 's:open', -1)
  count(group.book, 's:dropped:' .. reason, 1)
  emit('lose', group.book, group.ordinal, 1, group.step, reason)
  if usable(group) < minimum(group) then
    drop(group, reason)
  elseif group.left == 0 then
    complete(group)
  end
end

-- A claimed sample ended without a trajectory: 'retry' within its budget, else 'dropped' and a dead letter.
local function fail(group, i, attempt, class, reason, outcome, message)
  local used = call('HINCRBY', group.key, (class == 'infra' and 'fi' or 'fd') .. i, 1)
  dequeue(call('HGET', group.key, 'e' .. i))
  call('HSET', group.key, 'o' .. i, outcome)
  if used < math.max(1, CFG[class] or 1) then
    enqueue(group, i, 'r')
    count(group.book, 'claimed', -1)
    count(group.book, 'queued', 1)
    emit('retry', group.book, group.ordinal, 1, group.step, reason)
    return 'retry'
  end
  call('XADD', PREFIX .. 'dead', 'MAXLEN', '~', 10000, '*', 'at', NOW, 'b', group.book, 'g', group.ordinal, 'i', i,
    'a', attempt, 'o', outcome, 'm', message)
  lose(group, i, reason)
  return 'dropped'
end
