-- Append: stores a payload and its state; the last sibling completes the group. The first accepted attempt wins.
-- ARGV: for each trajectory: book, ordinal, sample, attempt, ManifestSample, SampleResult, payload.
-- Reply: ok, then accepted | duplicate | stale | unissued for each | no_run
if not CFG.infra then return { 'no_run' } end

local function append(at)
  local group, i, attempt = load(ARGV[at], ARGV[at + 1]), ARGV[at + 2], tonumber(ARGV[at + 3])
  if not group or group.state == 'dropped' then return 'stale' end
  local v = call('HMGET', group.key, 's' .. i, 'a' .. i, 'e' .. i, 'h' .. i)
  if not v[1] or v[1] == 'x' then return 'stale' end
  if v[1] == 'd' then
    -- The same attempt again is a caller that lost our answer.
    if tonumber(v[2]) == attempt then return 'accepted' end
    count(group.book, 'duplicates', 1)
    emit('duplicate', group.book, group.ordinal, 1, group.step)
    return 'duplicate'
  end
  if attempt <= tonumber(v[4] or '0') and attempt > 0 then return 'stale' end
  if attempt < 1 or attempt > tonumber(v[2]) then return 'unissued' end
  call('SET', PREFIX .. 't:' .. group.book .. ':' .. group.ordinal .. ':' .. i, ARGV[at + 6])
  dequeue(v[3])
  group.left = group.left - 1
  call('HSET', group.key, 's' .. i, 'd', 'a' .. i, attempt, 'left', group.left, 'm' .. i, ARGV[at + 4],
    'r' .. i, ARGV[at + 5])
  count(group.book, v[1] == 'q' and 'queued' or 'claimed', -1)
  count(group.book, 'done', 1)
  emit('append', group.book, group.ordinal, 1, group.step)
  if group.left == 0 then complete(group) end
  return 'accepted'
end

local reply = { 'ok' }
for at = 1, #ARGV, 7 do reply[#reply + 1] = append(at) end
commit()
return reply
