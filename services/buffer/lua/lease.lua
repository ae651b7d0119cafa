-- Lease: the groups of a train step, by ordinal and never by arrival. ARGV: epoch, step, groups, version, order.
-- With the order 'ready_first' stragglers of the step change places with ready groups of later open steps, as many as
-- are needed and only if that completes the step: every step keeps its number of groups.
-- The same step again returns the same groups. After a restore those that were trained before come first.
-- Reply: leased, then {ordinal, ManifestSample or nil for each sample, TraceContext for each sample} | waiting, ready, missing, open
--        | no_run | fenced, epoch
if not CFG.infra then return { 'no_run' } end
local refusal = refuse_epoch(tonumber(ARGV[1]))
if refusal then return refusal end
local step, wanted, version = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function too_old(group, lowest, restored)
  if group.state ~= 'ready' or restored == '1' or not CFG.max_age or not lowest or lowest == '' then return false end
  return version - tonumber(lowest) > CFG.max_age
end

local taken, restored, fresh, ready, live = {}, {}, {}, 0, 0
for _, ordinal in ipairs(call('ZRANGE', PREFIX .. 'step:train:' .. step, 0, -1)) do
  local group = load('train', ordinal)
  local v = call('HMGET', group.key, 'minv', 'rs')
  if too_old(group, v[1], v[2]) then
    drop(group, 'age')
  elseif not is_live(group.state) or group.state == 'leased' then
    taken[#taken + 1] = group
  else
    live = live + 1
    if group.state == 'ready' then ready = ready + 1 end
    local list = v[2] == '1' and restored or fresh
    list[#list + 1] = group
  end
end

local function answer(groups)
  local reply = { 'leased' }
  for _, group in ipairs(groups) do
    local samples, roots = {}, {}
    for i = 0, group.n - 1 do
      samples[#samples + 1] = 'm' .. i
      roots[#roots + 1] = 'c' .. i
    end
    reply[#reply + 1] = { group.ordinal, call('HMGET', group.key, unpack(samples)),
      call('HMGET', group.key, unpack(roots)) }
  end
  return reply
end

if #taken > 0 then
  commit()
  return answer(taken)
end

-- Groups of later steps that could be trained at this one, lowest step and ordinal first; at most n.
local function spare(n)
  local found = {}
  local last = tonumber(call('HGET', PREFIX .. 'n:train', 'max_step') or '-1')
  for later = tonumber(step) + 1, last do
    for _, ordinal in ipairs(call('ZRANGE', PREFIX .. 'step:train:' .. later, 0, -1)) do
      if #found == n then return found end
      local group = load('train', ordinal)
      local v = call('HMGET', group.key, 'minv', 'rs')
      if group.state == 'ready' and v[2] ~= '1' and not too_old(group, v[1], v[2]) then found[#found + 1] = group end
    end
  end
  return found
end

local function retarget(group, to)
  local from = group.step
  call('ZREM', PREFIX .. 'step:train:' .. from, group.ordinal)
  call('ZADD', PREFIX .. 'step:train:' .. to, group.ordinal, group.ordinal)
  call('HSET', group.key, 'step', to)
  group.step = tonumber(to)
  emit('swap', 'train', group.ordinal, usable(group), to, tostring(from), ARGV[1])
end

-- What is complete is judged within moments: only open groups are stragglers.
local function swap()
  local late, ready_ones = {}, {}
  for _, group in ipairs(fresh) do
    if group.state == 'open' then late[#late + 1] = group
    elseif group.state == 'ready' then ready_ones[#ready_ones + 1] = group
    else return end
  end
  -- A surplus straggler is in nobody's way: it stays.
  local needed = math.max(0, wanted - ready)
  local others = spare(needed)
  if #others < needed then return end
  for i = 1, needed do
    local group, to = late[i], others[i].step
    retarget(others[i], tonumber(step))
    retarget(group, to)
    -- It is sampled at a version of its old step: a restore cannot wait for the new one to be opened again.
    call('HSET', group.key, 'sw', '1')
    ready_ones[#ready_ones + 1] = others[i]
  end
  table.sort(ready_ones, function(a, b) return tonumber(a.ordinal) < tonumber(b.ordinal) end)
  fresh = ready_ones
end

if ARGV[5] == 'ready_first' and live >= wanted and ready < live then swap() end
local chosen, all_ready = {}, true
for _, list in ipairs({ restored, fresh }) do
  for _, group in ipairs(list) do
    if #chosen < wanted then
      chosen[#chosen + 1] = group
      all_ready = all_ready and group.state == 'ready'
    end
  end
end
if #chosen < wanted or not all_ready then
  commit()
  return { 'waiting', ready, math.max(0, wanted - live), live - ready }
end
table.sort(chosen, function(a, b) return tonumber(a.ordinal) < tonumber(b.ordinal) end)
for _, group in ipairs(chosen) do
  move(group, 'leased')
  emit('lease', 'train', group.ordinal, usable(group), group.step, '', ARGV[1])
end
commit()
return answer(chosen)
